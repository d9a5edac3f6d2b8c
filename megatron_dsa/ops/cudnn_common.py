"""What the adapters to cuDNN's front end share: list widths, head padding, workspace of a call.

Its Hopper kernels are compiled per list width, head count and dims when they are first called, and
kept in this process only. Widths are therefore rounded up to a few buckets, and every call passes a
``topk_length``, so that a new ``K`` or a first packed batch does not compile again.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def bucket(width: int) -> int:
    """Smallest list width that kernels are compiled for: 128, 256, then multiples of 512."""
    for size in (128, 256):
        if width <= size:
            return size
    return -(-width // 512) * 512


def bucketed_indices(indices: torch.Tensor, topk_length: torch.Tensor | None):
    """Return indices ``[Sq, bucket(K)]`` padded with -1, and ``length [Sq]`` within ``[0, K]``."""
    width = indices.shape[1]
    if topk_length is None:
        length = torch.full(indices.shape[:1], width, dtype=torch.int32, device=indices.device)
    else:
        length = topk_length.clamp(0, width).int().contiguous()
    return widened(indices, -1), length


def widened(lists: torch.Tensor, value) -> torch.Tensor:
    """Pad the last dim of ``lists [Sq, K]`` to its bucket with ``value``; contiguous."""
    return pad(lists, (0, bucket(lists.shape[1]) - lists.shape[1]), value=value).contiguous()


def padded_heads(heads: int, sizes: tuple[int, ...]) -> int:
    """Smallest of ``sizes`` that holds ``heads``, else the next multiple of the largest."""
    for size in sizes:
        if heads <= size:
            return size
    return -(-heads // sizes[-1]) * sizes[-1]
