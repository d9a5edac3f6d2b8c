"""Sums of gradients in global memory: their orders of columns, and the scale of integers."""

import torch

from megatron_dsa.ops.common.scaling import has_triton


def in_column_order(accumulator: torch.Tensor) -> torch.Tensor:
    """Return ``[keys, dim]`` in column order, as Hopper kernels, ours and cuDNN's, add to it.

    16 columns of a fragment lie as ``[4 threads, 2 halves, 2]`` instead of ``[2 halves, 4 threads,
    2]``: a thread adds four neighbours at a time.
    """
    if _takes_kernel(accumulator):
        from megatron_dsa.ops.hopper.sums_triton import reorder  # needs Triton

        return reorder(accumulator, accumulator.shape[1], transposed=False)
    fragments = accumulator.unflatten(1, (-1, 4, 2, 2))
    return fragments.transpose(2, 3).reshape(accumulator.shape)


def in_column_order_transposed(accumulator: torch.Tensor, v_dim: int) -> torch.Tensor:
    """Return ``[keys, dim]`` in column order, for kernels whose fragments hold columns as rows.

    128 value columns lie as ``[4 warps, 8 lines, 2 fragments, 2 halves]`` instead of ``[2
    fragments, 4 warps, 2 halves, 8 lines]``; 64 columns past the values as one fragment.
    """
    if _takes_kernel(accumulator):
        from megatron_dsa.ops.hopper.sums_triton import reorder  # needs Triton

        return reorder(accumulator, v_dim, transposed=True)
    values, tail = accumulator[:, :v_dim], accumulator[:, v_dim:]
    ordered = torch.empty_like(accumulator, memory_format=torch.contiguous_format)
    in_order = ordered[:, :v_dim].unflatten(1, (-1, 2, 4, 2, 8))
    in_order.copy_(values.unflatten(1, (-1, 4, 8, 2, 2)).permute(0, 1, 4, 2, 5, 3))
    if tail.shape[1]:
        in_order = ordered[:, v_dim:].unflatten(1, (-1, 4, 2, 8))
        in_order.copy_(tail.unflatten(1, (-1, 4, 8, 2)).transpose(3, 4))
    return ordered


def _takes_kernel(accumulator: torch.Tensor) -> bool:
    return accumulator.is_cuda and accumulator.is_contiguous() and has_triton()


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in ``x`` as an fp32 scalar, 0 if it is empty."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=float("inf")).float()


def units_for(rows: int, per_row: torch.Tensor) -> torch.Tensor:
    """Return the scale of integers: fp32 ``[1]``, a power of two, without synchronisation.

    ``rows`` addends of at most ``per_row`` each reach 2^61, with room for the roundings of bf16.
    """
    exponent = torch.floor(62 - torch.log2(2 * rows * per_row)).clamp(max=100)
    return torch.exp2(exponent).view(1)
