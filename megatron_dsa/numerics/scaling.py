"""A gradient times a number, in one pass over memory."""

from __future__ import annotations

import functools

import torch

from megatron_dsa.dispatch.packages import TRITON
from megatron_dsa.numerics.arithmetic import accumulation_dtype


def scaled(
    gradient: torch.Tensor,
    factor: torch.Tensor | float,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Return ``factor * gradient``, multiplied in fp32, in ``dtype`` (default: the gradient's).

    Args:
        gradient: any floating dtype.
        factor: a number, or a tensor of one element.
        dtype: of the result.
        in_place: the result may take the place of the gradient, if that has its dtype.
    """
    dtype = gradient.dtype if dtype is None else dtype
    if isinstance(factor, torch.Tensor) and factor.device.type == "cpu":
        factor = factor.item()  # copying a tensor of the host would synchronise
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float64, device=gradient.device)
    # With one dim the factor keeps its dtype, and the product is rounded where it is written.
    factor = factor.to(accumulation_dtype(gradient.dtype)).view(1)
    in_place = in_place and gradient.dtype == dtype
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    fits = gradient.is_cuda and gradient.is_contiguous() and factor.dtype == torch.float32
    if fits and has_triton():
        from megatron_dsa.numerics.scaling_triton import scale  # needs Triton

        return scale(gradient, factor, out)
    return torch.mul(gradient, factor, out=out)


@functools.cache
def has_triton() -> bool:
    """Whether small helpers may be Triton kernels; operations ask through dispatch."""
    return TRITON.problem() is None
