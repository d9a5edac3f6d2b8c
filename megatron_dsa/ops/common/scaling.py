"""Scaling of gradients in one pass, by factors that stay on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch.packages import TRITON


@dataclass(frozen=True)
class Factor:
    """Factor ``number * times / over``, computed on the device of the scaled tensor.

    ``times`` and ``over`` are one-element tensors; ``None`` means 1.
    """

    number: float = 1.0
    times: torch.Tensor | None = None
    over: torch.Tensor | None = None

    @classmethod
    def of(cls, factor: Factor | torch.Tensor | float) -> Factor:
        if isinstance(factor, Factor):
            return factor
        if isinstance(factor, torch.Tensor):
            return cls(times=factor.detach())
        return cls(float(factor))

    def on_device(self) -> Factor:
        """Return the factor without host tensors, which would stall the device."""
        number, tensors = self.number, [self.times, self.over]
        if self.times is not None and self.times.device.type == "cpu":
            number, tensors[0] = number * self.times.item(), None
        if self.over is not None and self.over.device.type == "cpu":
            number, tensors[1] = number / self.over.item(), None
        return Factor(number, *tensors)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self.times is None and self.over is None:
            return x * self.number
        return (x * self.value(x.device)).to(x.dtype)

    def value(self, device: torch.device) -> torch.Tensor:
        if self.times is None:
            value = torch.full((), self.number, dtype=torch.float64, device=device)
        else:
            value = self.times.to(device, torch.float64).reshape(()) * self.number
        return value if self.over is None else value / self.over.reshape(())


class Scaled(NamedTuple):
    value: torch.Tensor
    factor: Factor


def scaled(
    gradient: torch.Tensor,
    factor: Factor | torch.Tensor | float,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Return ``factor * gradient`` in ``dtype``, by default the gradient's; multiply in fp32.

    ``in_place`` overwrites a gradient that already has ``dtype``.
    """
    dtypes = (gradient.dtype if dtype is None else dtype,)
    return scaled_together((gradient,), factor, dtypes, in_place)[0]


def scaled_together(
    gradients: Sequence[torch.Tensor],
    factor: Factor | torch.Tensor | float,
    dtypes: Sequence[torch.dtype],
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    factor = Factor.of(factor).on_device()
    results = tuple(
        gradient
        if in_place and gradient.dtype == dtype
        else torch.empty_like(gradient, dtype=dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )
    fits = all(x.is_cuda and x.is_contiguous() and x.dtype != torch.float64 for x in gradients)
    if fits and has_triton():
        from megatron_dsa.ops.common.scaling_triton import scale

        scale(gradients, factor.number, factor.times, factor.over, results)
        return results
    value = factor.value(gradients[0].device)
    for gradient, result in zip(gradients, results, strict=True):
        # A one-dim factor promotes the product to the factor's dtype, so only the write rounds.
        torch.mul(gradient, value.to(accumulation_dtype(gradient.dtype)).view(1), out=result)
    return results


def add_to_mean(sums: torch.Tensor, counts: torch.Tensor, scaled: Scaled) -> None:
    value, factor = scaled.value, scaled.factor.on_device()
    if value.is_cuda and value.dtype == sums.dtype and has_triton():
        from megatron_dsa.ops.common.scaling_triton import add_scaled

        add_scaled(sums, counts, value, factor.number, factor.times, factor.over)
        return
    sums.add_(factor.apply(value).to(sums.dtype))
    counts.add_(1)


@functools.cache
def has_triton() -> bool:
    """Return whether helpers outside dispatch may use Triton kernels."""
    return TRITON.problem() is None
