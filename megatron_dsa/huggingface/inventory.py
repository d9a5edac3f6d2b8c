"""Which layers and experts a checkpoint has, against what its config.json says."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_dsa.errors import ConfigError
from megatron_dsa.huggingface.config_json import HFModel
from megatron_dsa.huggingface.names import Location


def check_inventory(directory: str | Path, names: Collection[str], hf: HFModel) -> None:
    """Raise for tensors of layers and experts that the model of config.json does not have.

    Tensors that are missing are noticed when a parameter needs them.

    Args:
        directory: of the checkpoint.
        names: of its tensors.
        hf: what its config.json says.

    Raises:
        ConfigError: names the layers or experts and the keys of config.json.
    """
    located = {name: hf.names.locate(name) for name in names}
    located = {name: place for name, place in located.items() if place is not None}
    decoder = {hf.names.prefix(i, False, hf.num_layers) for i in range(hf.num_layers)}
    prediction = [hf.names.prefix(i, True, hf.num_layers) for i in range(hf.mtp_layers)]
    known = decoder.union(prediction)
    if beyond := {x.prefix for x in located.values()} - known:
        count = sum(x.prefix in beyond for x in located.values())
        raise ConfigError(
            f"checkpoint {directory}: {count} tensors are of layers that config.json does not "
            f"count ({_some(beyond)}): it says num_hidden_layers = {hf.num_layers} and "
            f"num_nextn_predict_layers = {hf.mtp_layers}; use the config.json that came with the "
            "weights, and count layers of multi-token prediction in num_nextn_predict_layers"
        )
    own = {line.hf[0] for line in hf.names.mtp}
    for name, place in located.items():
        if place.prefix in decoder and name.removeprefix(place.prefix) in own:
            raise ConfigError(
                f"checkpoint {directory}: {name} belongs to multi-token prediction, and by "
                f"config.json (num_hidden_layers = {hf.num_layers}) that layer is one of the "
                "decoder: use the config.json that came with the weights"
            )
    for prefix in prediction:
        if any(x.prefix == prefix for x in located.values()) and not any(
            prefix + name in located for name in own
        ):
            raise ConfigError(
                f"checkpoint {directory}: layer {prefix.rstrip('.')} has no tensors of multi-token "
                f"prediction, and by config.json (num_hidden_layers = {hf.num_layers}) it is such "
                "a layer: use the config.json that came with the weights"
            )
    experts = hf.fields["num_moe_experts"] or 0
    more = [name for name, x in located.items() if x.expert is not None and x.expert >= experts]
    if more:
        raise ConfigError(
            f"checkpoint {directory}: {len(more)} tensors are of experts that config.json does not "
            f"count, the first is {min(more)}: it says n_routed_experts = {experts or None}; use "
            "the config.json that came with the weights"
        )


def left_by_rank(unused: Iterable[Location], used: Collection[Location]) -> list[Location]:
    """Return the tensors of a rank's own layers and experts that it does not read.

    Args:
        unused: what the rank does not read.
        used: what it reads.
    """
    layers = {place.prefix for place in used}
    experts = {(place.prefix, place.expert) for place in used if place.expert is not None}
    with_experts = {prefix for prefix, _ in experts}

    def is_own(place: Location) -> bool:
        if place.expert is None or place.prefix not in with_experts:
            return place.prefix in layers
        return (place.prefix, place.expert) in experts

    return [place for place in unused if is_own(place)]


def _some(prefixes: Collection[str]) -> str:
    first = sorted(prefix.rstrip(".") for prefix in prefixes)
    return ", ".join(first[:4]) + (f" and {len(first) - 4} more" if len(first) > 4 else "")
