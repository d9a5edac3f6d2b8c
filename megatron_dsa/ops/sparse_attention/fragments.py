"""The order in which Hopper kernels accumulate the key gradient."""

from __future__ import annotations

import torch


def in_column_order(accumulator: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, dim]`` in column order.

    The 16 columns of a matrix-unit fragment are accumulated as ``[4 threads, 2 halves, 2]`` instead
    of ``[2 halves, 4 threads, 2]``, so that a thread adds four neighbours at a time.
    """
    rows, dim = accumulator.shape
    fragments = accumulator.view(rows, dim // 16, 4, 2, 2)
    return fragments.permute(0, 1, 3, 2, 4).reshape(rows, dim)
