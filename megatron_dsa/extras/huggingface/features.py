"""Features of a model that it may be built without: hyper-connections, hash routing, prediction.

A checkpoint has them by its config.json and its tensors, a model by its configuration. What a
checkpoint has and a model has not is left out on request (``--without``), never by itself.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.config_json import HFModel, model_features
from megatron_dsa.extras.huggingface.deepseek_v4 import HASH_LAYERS
from megatron_dsa.extras.huggingface.files import CheckpointReader
from megatron_dsa.extras.huggingface.hyper_connections import is_identity
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, PREDICTION


def check_names(hf: HFModel, without: Collection[str]) -> None:
    """Raise for a feature that the model type does not have."""
    known = hf.names.features
    unknown = sorted(set(without) - set(known))
    require(
        not unknown,
        f"--without {' '.join(unknown)}: {hf.names.models} has "
        f"{', '.join(known) or 'nothing to leave out'}",
    )


def described_features(hf: HFModel) -> set[str]:
    """Return the features that config.json describes."""
    fields = {
        HYPER_CONNECTIONS: hf.fields.get("hc_mult", 1) > 1,
        HASH_ROUTING: hf.fields.get(HASH_LAYERS, 0) > 0,
        PREDICTION: hf.mtp_layers > 0,
    }
    return {feature for feature, has in fields.items() if has}


def check_prediction(hf: HFModel, features: Collection[str]) -> None:
    """Raise if what predicts further tokens is something else than the layers that are counted.

    DeepSeek-V4-Flash-0731 has stages of DSpark in their place: ``mtp.0`` to ``mtp.2``, a ratio for
    each, and one counted layer.

    Args:
        hf: the checkpoint's config.json.
        features: of the model.
    """
    listed = len(hf.raw.get("compress_ratios") or ())
    require(
        PREDICTION not in features or listed <= hf.num_layers + hf.mtp_layers,
        f"compress_ratios has {listed} entries, and config.json counts {hf.num_layers} layers and "
        f"{hf.mtp_layers} of multi-token prediction (num_nextn_predict_layers): its modules that "
        f"predict tokens, such as DSpark's, are not understood; leave them out by --without "
        f"{PREDICTION} (of a training run: --dsa-hf-without)",
    )


def features_to_build(hf: HFModel, reader: CheckpointReader, without: Collection[str]) -> set[str]:
    """Return the features of the model that a checkpoint is imported into.

    Hyper-connections that leave plain residuals are not built.

    Args:
        hf: the checkpoint's config.json.
        reader: its tensors.
        without: features to leave out.

    Raises:
        ConfigError: ``without`` names a feature that the model type does not have, or predictions
            are not those of V4.
    """
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
    """Return the tensors of a checkpoint that a Megatron model does not read, by feature.

    Multi-token prediction is among them only if ``without`` names it: a model without it need not
    say so.

    Args:
        hf: the checkpoint's config.json.
        reader: its tensors.
        config: the model's transformer configuration.
        without: features that are left out on request.

    Raises:
        ConfigError: the model lacks what the checkpoint has, or has what ``without`` names; its
            predictions are not the checkpoint's.
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
    """Raise if ``what``, a model, has hyper-connections or hash routing and config.json has not."""
    more = sorted(set(features) - described_features(hf) - {PREDICTION})
    keys = {HYPER_CONNECTIONS: "hc_mult", HASH_ROUTING: "num_hash_layers or mlp_layer_types"}
    require(
        not more,
        f"{what} has {' and '.join(more)}, and config.json, of a {hf.raw['model_type']}, has not "
        f"({', '.join(keys[x] for x in more)}): give the config.json of the model that was trained",
    )


def leaves_plain_residuals(
    hf: HFModel, reader: CheckpointReader, tensors: dict[str, list[str]]
) -> bool:
    """Whether a checkpoint's hyper-connections do nothing; ``tensors`` has those by feature."""
    connections, streams = tensors.get(HYPER_CONNECTIONS), hf.raw.get("hc_mult")
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
