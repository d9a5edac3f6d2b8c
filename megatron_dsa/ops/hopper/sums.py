"""Conversion of accumulated gradients to column order, and the fixed-point scale."""

import torch

from megatron_dsa.ops.common.scaling import has_triton


def in_column_order(accumulator: torch.Tensor) -> torch.Tensor:
    """Convert a gradient ``[keys, dim]`` of Hopper kernels (ours or cuDNN's) to column order.

    The kernels store 16 columns ``[2 halves, 4 threads, 2]`` of a fragment as ``[4 threads, 2
    halves, 2]``.
    """
    if _takes_kernel(accumulator):
        from megatron_dsa.ops.hopper.sums_triton import reorder

        return reorder(accumulator, accumulator.shape[1], transposed=False)
    fragments = accumulator.unflatten(1, (-1, 4, 2, 2))
    return fragments.transpose(2, 3).reshape(accumulator.shape)


def in_column_order_transposed(accumulator: torch.Tensor, v_dim: int) -> torch.Tensor:
    """Convert a gradient ``[keys, dim]`` from transposed fragment order to column order.

    The kernels store 128 value columns ``[2 fragments, 4 warps, 2 halves, 8 lines]`` as ``[4 warps,
    8 lines, 2 fragments, 2 halves]``, and 64 columns past the values as one fragment.
    """
    if _takes_kernel(accumulator):
        from megatron_dsa.ops.hopper.sums_triton import reorder

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
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=float("inf")).float()


def units_for(count: int, bound: torch.Tensor) -> torch.Tensor:
    """Return the fixed-point scale, a power of two in fp32 ``[1]``, without GPU synchronisation.

    A sum of ``count`` addends up to ``bound`` stays within 2^61: bf16 roundings need room.
    """
    exponent = torch.floor(62 - torch.log2(2 * count * bound)).clamp(max=100)
    return torch.exp2(exponent).view(1)
