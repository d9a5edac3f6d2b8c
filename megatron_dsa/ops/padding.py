"""What the adapters to other packages share: list widths, invalid entries, head padding.

cuDNN's Hopper kernels are compiled per list width, head count and dims when they are first called,
and kept in this process only. Widths are therefore rounded up to a few buckets, and every call
passes a ``topk_length``, so that a new ``K`` or a first packed batch does not compile again.
"""

import torch
from torch.nn.functional import pad

from megatron_dsa.ops.common.arithmetic import valid_entries


def bucket(width: int) -> int:
    """Smallest list width that kernels are compiled for: 128, 256, then multiples of 512."""
    for size in (128, 256):
        if width <= size:
            return size
    return -(-width // 512) * 512


def masked_indices(
    indices: torch.Tensor, topk_length: torch.Tensor | None, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which entries ``[Sq, K]`` select a key, and the indices with -1 at all others.

    The indices come in their bucket of widths. ``keys`` is the number of rows they may select.
    """
    valid = valid_entries(indices, topk_length, keys)
    return valid, widened(torch.where(valid, indices, -1), -1)


def widened(lists: torch.Tensor, value) -> torch.Tensor:
    """Pad the last dim of ``lists [Sq, K]`` to its bucket with ``value``; contiguous."""
    return pad(lists, (0, bucket(lists.shape[1]) - lists.shape[1]), value=value).contiguous()


def with_heads(x: torch.Tensor, heads: int, dim: int, value: float = 0.0) -> torch.Tensor:
    """Pad dimension ``dim`` (from the end, negative) of ``x`` to ``heads``; contiguous."""
    missing = heads - x.shape[dim]
    if missing:  # pad would copy
        x = pad(x, (0, 0) * (-1 - dim) + (0, missing), value=value)
    return x.contiguous()


def padded_heads(heads: int, sizes: tuple[int, ...]) -> int:
    """Smallest of ``sizes`` that holds ``heads``, else the next multiple of the largest."""
    for size in sizes:
        if heads <= size:
            return size
    return -(-heads // sizes[-1]) * sizes[-1]
