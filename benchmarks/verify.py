"""When a result counts: its relative error against float64."""

from __future__ import annotations

import math

import torch

#: A result that is further from float64 than this is no result. bf16 kernels land near 2e-3.
ERROR_LIMIT = 1e-2


class WrongResult(Exception):
    """A result breaks the contract in a way that is no matter of rounding."""


def largest_error(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the largest ``norm(x - ref) / norm(ref)``; infinity if anything is not finite."""
    worst = 0.0
    for x, reference in pairs:
        reference = reference.double()
        error = float((x.double() - reference).norm() / reference.norm())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
