"""Optional features of a model, which ``--without`` omits."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.config_json import HFModel, model_features
from megatron_dsa.extras.huggingface.files import CheckpointReader
from megatron_dsa.extras.huggingface.model_v4 import HASH_LAYERS
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, PREDICTION


def check_names(hf: HFModel, without: Collection[str]) -> None:
    known = hf.names.features
    unknown = sorted(set(without) - set(known))
    require(
        not unknown,
        f"--without {' '.join(unknown)}: {hf.names.models} has "
        f"{', '.join(known) or 'nothing to leave out'}",
    )


def described_features(hf: HFModel) -> set[str]:
    fields = {
        HYPER_CONNECTIONS: hf.fields.get("hc_mult", 1) > 1,
        HASH_ROUTING: hf.fields.get(HASH_LAYERS, 0) > 0,
        PREDICTION: hf.mtp_layers > 0,
    }
    return {feature for feature, has in fields.items() if has}


def check_prediction(hf: HFModel, features: Collection[str]) -> None:
    """Reject prediction modules that config.json does not count, such as DSpark's."""
    listed = len(hf.text.get("compress_ratios") or ())
    require(
        PREDICTION not in features or listed <= hf.num_layers + hf.mtp_layers,
        f"compress_ratios has {listed} entries, and config.json counts {hf.num_layers} layers and "
        f"{hf.mtp_layers} of multi-token prediction (num_nextn_predict_layers): its modules that "
        f"predict tokens, such as DSpark's, are not understood; leave them out by --without "
        f"{PREDICTION} (of a training run: --dsa-hf-without)",
    )


def features_to_build(hf: HFModel, reader: CheckpointReader, without: Collection[str]) -> set[str]:
    """Return the features to build, except identity hyper-connections."""
    check_names(hf, without)
    tensors = hf.names.by_feature(reader.names())
    features = described_features(hf) - set(without)
    check_prediction(hf, features)
    if PREDICTION in hf.names.features and PREDICTION not in tensors:
        features.discard(PREDICTION)
    if leaves_plain_residuals(hf, reader, tensors):
        features.discard(HYPER_CONNECTIONS)
    return features


def left_tensors(
    hf: HFModel, reader: CheckpointReader, config: Any, without: Collection[str]
) -> dict[str, list[str]]:
    """Return unread tensors by feature; include multi-token prediction only if in ``without``.

    Raises:
        ConfigError: model, checkpoint and ``without`` disagree on a feature.
    """
    check_names(hf, without)
    has = model_features(config)
    both = sorted(has & set(without))
    require(
        not both,
        f"--without {' '.join(both)}: the model has it; drop the flag that adds it to the model "
        "(--hc-mult, --mtp-num-layers), or this one",
    )
    check_prediction(hf, has)
    tensors = hf.names.by_feature(reader.names())
    left = {x: names for x, names in tensors.items() if x in without or x not in has}
    if PREDICTION not in without:
        left.pop(PREDICTION, None)
    lost = {x: names for x, names in left.items() if x not in without}
    if leaves_plain_residuals(hf, reader, tensors):
        lost.pop(HYPER_CONNECTIONS, None)
    if lost:
        _refuse(reader.directory, lost)
    return left


def check_features(hf: HFModel, features: Collection[str], what: str) -> None:
    """Reject features absent in config.json, and hyper-connections absent in the model."""
    more = sorted(set(features) - described_features(hf) - {PREDICTION})
    keys = {HYPER_CONNECTIONS: "hc_mult", HASH_ROUTING: "num_hash_layers or mlp_layer_types"}
    less = described_features(hf) - set(features) - set(hf.names.features) - {PREDICTION}
    require(
        not less,
        f"{what} has no {' and '.join(sorted(less))}, and config.json, of a "
        f"{hf.raw['model_type']}, has ({', '.join(keys[x] for x in sorted(less))}): give the "
        "config.json of the model that was trained",
    )
    require(
        not more,
        f"{what} has {' and '.join(more)}, and config.json, of a {hf.raw['model_type']}, has not "
        f"({', '.join(keys[x] for x in more)}): give the config.json of the model that was trained",
    )


def leaves_plain_residuals(
    hf: HFModel, reader: CheckpointReader, tensors: dict[str, list[str]]
) -> bool:
    connections, streams = tensors.get(HYPER_CONNECTIONS), hf.text.get("hc_mult")
    return bool(connections and streams and is_identity(reader, connections, streams))


def _refuse(directory: Path, lost: dict[str, list[str]]) -> NoReturn:
    lines = [
        f"  - {len(names)} tensors of {feature}" + (f", as {names[0]}" if names else "")
        for feature, names in lost.items()
    ]
    raise ConfigError(
        f"checkpoint {directory} has more than what the model is built with:\n"
        + "\n".join(sorted(lines))
        + f"\nGive the flags that python -m megatron_dsa flags {directory} prints. To start "
        "another model from the other weights, with plain residuals and learned routing, add: "
        f"--without {' '.join(sorted(lost))} (of a training run: --dsa-hf-without)"
    )


# V4 weights are f(scale * (fn @ streams) + base): f is a sigmoid for reading, twice a sigmoid for
# adding, doubly stochastic for mixing. With scale 0, these bases use stream 0 without mixing.

#: Argument that saturates the sigmoid in fp32.
_LARGE = 200.0


def _bases(streams: int) -> dict[str, torch.Tensor]:
    mix = torch.full((streams, streams), -_LARGE).fill_diagonal_(_LARGE)
    read = mix[0]
    add = read.clamp(max=0)  # 2 * sigmoid(0) = 1
    layer = torch.cat([read, add, mix.flatten()])
    return {"attn": layer, "ffn": layer, "head": read}


def identity(
    streams: int, hidden: int, layers: list[str], heads: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield fp32 hyper-connections that act as plain residuals, by prefix of layer or head."""
    bases = _bases(streams)
    read = [(prefix, kind) for prefix in layers for kind in ("attn", "ffn")]
    for prefix, kind in read + [(prefix, "head") for prefix in heads]:
        base = bases[kind]
        yield f"{prefix}hc_{kind}_fn", torch.zeros(len(base), streams * hidden)
        yield f"{prefix}hc_{kind}_base", base
        yield f"{prefix}hc_{kind}_scale", torch.zeros(1 if kind == "head" else 3)


def is_identity(reader: CheckpointReader, names: list[str], streams: int) -> bool:
    bases = _bases(streams)
    for name in names:
        kind, part = name.rsplit("_", 2)[-2:]
        if part == "scale" and reader.read(name).any():
            return False
        if part == "base" and not torch.equal(reader.read(name).float(), bases[kind]):
            return False
    return True
