"""Values that are no numbers, counted tensor by tensor while weights are converted."""

from __future__ import annotations

import torch

from megatron_dsa.errors import ConfigError

#: Tensors that an error names.
_NAMED = 20


class NonFinite:
    """Counts NaN and infinite values; conversions go on, so that the error names all tensors.

    Args:
        source: what is read, for the error.
        fix: what to do about it, for the error.
    """

    def __init__(self, source: str, fix: str):
        self._source, self._fix = source, fix
        self._found: dict[str, str] = {}

    def count(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Look at the values of a tensor.

        Args:
            name: of the tensor, for the error.
            values: as stored, floating point of any shape.
            dtype: that the values are about to be turned into.
        """
        if not values.numel() or torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
            return
        counts = {"NaN": int(values.isnan().sum()), "infinite": int(values.isinf().sum())}
        converted = int((~values.to(dtype).isfinite()).sum())
        too_large = f"too large for {str(dtype).removeprefix('torch.')}"
        counts[too_large] = converted - sum(counts.values())
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        self._found[name] = f"{said} of {values.numel()} values"

    def check(self) -> None:
        """Raise :class:`ConfigError` if a tensor had such values; the error counts and names."""
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
