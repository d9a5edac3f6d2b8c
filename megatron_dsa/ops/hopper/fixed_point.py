"""Integers that key gradients are summed in: how many of them are one."""

from __future__ import annotations

import torch


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in ``x`` as fp32 without dims, 0 if it is empty."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=float("inf")).float()


def units_for(rows: int, per_row: torch.Tensor) -> torch.Tensor:
    """Return how many integers are one: fp32 ``[1]``, a power of two, without synchronisation.

    ``rows`` rows that contribute at most ``per_row`` each reach 2^61 then: bf16 roundings of what
    they come from do not overflow.
    """
    exponent = torch.floor(62 - torch.log2(2 * rows * per_row)).clamp(max=100)
    return torch.exp2(exponent).view(1)
