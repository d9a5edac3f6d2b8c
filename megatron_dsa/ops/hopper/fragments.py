"""Orders in which Hopper kernels, ours and cuDNN's, accumulate the key gradient."""

import torch


def in_column_order(accumulator: torch.Tensor) -> torch.Tensor:
    """Return ``[keys, dim]`` in column order.

    16 columns of a fragment lie as ``[4 threads, 2 halves, 2]`` instead of ``[2 halves, 4 threads,
    2]``: a thread adds four neighbours at a time.
    """
    rows, dim = accumulator.shape
    fragments = accumulator.view(rows, dim // 16, 4, 2, 2)
    return fragments.permute(0, 1, 3, 2, 4).reshape(rows, dim)


def in_column_order_transposed(accumulator: torch.Tensor, v_dim: int) -> torch.Tensor:
    """Return ``[keys, dim]`` in column order, for kernels whose fragments hold columns as rows.

    128 value columns lie as ``[4 warps, 8 lines, 2 fragments, 2 halves]`` instead of ``[2
    fragments, 4 warps, 2 halves, 8 lines]``; 64 columns past the values as one fragment.
    """
    keys, dim = accumulator.shape
    ordered = accumulator.new_empty(keys, dim)
    values = accumulator[:, :v_dim].unflatten(1, (-1, 4, 8, 2, 2))
    in_order = ordered[:, :v_dim].unflatten(1, (-1, 2, 4, 2, 8))
    in_order.copy_(values.permute(0, 1, 4, 2, 5, 3))
    if dim > v_dim:
        tail = accumulator[:, v_dim:].unflatten(1, (-1, 4, 8, 2))
        in_order = ordered[:, v_dim:].unflatten(1, (-1, 4, 2, 8))
        in_order.copy_(tail.permute(0, 1, 2, 4, 3))
    return ordered
