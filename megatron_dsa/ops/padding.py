"""Padding of lists and heads for the kernels of other packages.

cuDNN compiles its Hopper kernels per list width, heads and dims, so widths are rounded up to
buckets and every call passes a ``topk_length``.
"""

import torch
from torch.nn.functional import pad

from megatron_dsa.ops.common.arithmetic import valid_entries


def bucket(width: int) -> int:
    return padded_heads(width, (128, 256, 512))


def masked_indices(
    indices: torch.Tensor, topk_length: torch.Tensor | None, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = valid_entries(indices, topk_length, keys)
    return valid, widened(torch.where(valid, indices, -1), -1)


def widened(lists: torch.Tensor, value) -> torch.Tensor:
    return pad(lists, (0, bucket(lists.shape[1]) - lists.shape[1]), value=value).contiguous()


def with_heads(x: torch.Tensor, heads: int, dim: int, value: float = 0.0) -> torch.Tensor:
    missing = heads - x.shape[dim]
    if missing:  # `pad` copies even without padding
        x = pad(x, (0, 0) * (-1 - dim) + (0, missing), value=value)
    return x.contiguous()


def padded_heads(heads: int, sizes: tuple[int, ...]) -> int:
    fitting = next((size for size in sizes if heads <= size), None)
    return fitting or -(-heads // sizes[-1]) * sizes[-1]
