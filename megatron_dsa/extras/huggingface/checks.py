"""Checks of a checkpoint's layers, experts and values."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NoReturn

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.config_json import HFModel
from megatron_dsa.extras.huggingface.names import Location

#: Number of tensors listed in an error.
_NAMED = 20


class NonFinite:
    """Counter of non-finite values in a conversion, reported in one error."""

    def __init__(self, source: str, fix: str):
        self._source, self._fix = source, fix
        self._found: dict[str, str] = {}

    def count(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Count values that are not finite, also after a cast to ``dtype``."""
        if not values.numel() or torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
            return
        counts = {"NaN": int(values.isnan().sum()), "infinite": int(values.isinf().sum())}
        converted = int((~values.to(dtype).isfinite()).sum())
        too_large = f"too large for {str(dtype).removeprefix('torch.')}"
        counts[too_large] = converted - sum(counts.values())
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        self._found[name] = f"{said} of {values.numel()} values"

    def check(self) -> None:
        if not self._found:
            return
        lines = [f"  - {name}: {said}" for name, said in self._found.items()]
        if len(lines) > _NAMED:
            lines[_NAMED:] = [f"  - and {len(lines) - _NAMED} more tensors"]
        raise ConfigError(
            f"{self._source}: {len(self._found)} tensors hold values that are no numbers:\n"
            + "\n".join(lines)
            + f"\nA model with one of them computes NaN: {self._fix}"
        )


def is_unused_bias(name: str, names: Collection[str]) -> bool:
    """Return whether ``name`` is a hash-routed layer's router bias."""
    router = name.removesuffix("expert_bias")
    return router != name and f"{router}tid2eid" in names


def check_inventory(directory: str | Path, locations: Iterable[Location], hf: HFModel) -> None:
    """Reject tensors of layers or experts beyond the numbers in config.json."""

    def refuse(complaint: str) -> NoReturn:
        fix = "use the config.json that came with the weights"
        raise ConfigError(f"checkpoint {directory}: {complaint}; {fix}")

    located = {x.name: x for x in locations if x.prefix}
    decoder = {hf.names.prefix(i, False, hf.num_layers) for i in range(hf.num_layers)}
    prediction = hf.names.mtp_prefixes(hf.mtp_layers, hf.num_layers)
    found = [x.prefix for x in located.values()]
    if beyond := [prefix for prefix in found if prefix not in decoder.union(prediction)]:
        layers = sorted({prefix.rstrip(".") for prefix in beyond})
        some = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
        refuse(
            f"{len(beyond)} tensors are of layers that config.json does not count ({some}): it "
            f"says num_hidden_layers = {hf.num_layers} and num_nextn_predict_layers = "
            f"{hf.mtp_layers}, which counts layers of multi-token prediction"
        )
    says = f"by config.json (num_hidden_layers = {hf.num_layers})"
    mtp_names = {line.hf[0] for line in hf.names.mtp}
    for name, x in located.items():
        if x.prefix in decoder and name.removeprefix(x.prefix) in mtp_names:
            refuse(f"{name} belongs to multi-token prediction, and {says} to a decoder layer")
    for prefix in prediction:
        if prefix in found and not any(prefix + name in located for name in mtp_names):
            refuse(
                f"layer {prefix.rstrip('.')} has no tensors of multi-token prediction, and {says} "
                "it is such a layer"
            )
    experts = hf.fields["num_moe_experts"] or 0
    more = [name for name, x in located.items() if x.expert is not None and x.expert >= experts]
    if more:
        refuse(
            f"{len(more)} tensors are of experts that config.json does not count, the first is "
            f"{min(more)}: it says n_routed_experts = {experts or None}"
        )


def left_by_rank(unused: Iterable[Location], used: Collection[Location]) -> list[Location]:
    """Return the ``unused`` tensors of this rank's layers and experts."""
    layers = {x.prefix for x in used} - {""}
    experts = {(x.prefix, x.expert) for x in used if x.expert is not None}
    with_experts = {prefix for prefix, _ in experts}

    def is_local(x: Location) -> bool:
        if x.expert is None or x.prefix not in with_experts:
            return x.prefix in layers
        return (x.prefix, x.expert) in experts

    return [x for x in unused if is_local(x)]
