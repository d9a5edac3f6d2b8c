"""A random share of the query tokens, on which the indexer's loss is estimated without bias.

The loss is a sum over query tokens. A tile of neighbours is taken at equal distances from a random
start, and the sum is multiplied by how many tokens stand for each: all tokens are equally likely,
so the mean over all starts is the loss of all tokens, and likewise its gradients. Tiles are as many
for every start: shapes are fixed.
"""

from typing import Any, NamedTuple

import torch

from megatron_dsa.ops.common.capture import tensor_cache

#: Neighbours that are taken together: kernels read the keys of a tile of queries at once.
TILE = 64


class QuerySample(NamedTuple):
    """Query tokens of a loss: int64 ``[n]``, all different, and how many each stands for."""

    tokens: torch.Tensor
    factor: float


def sample_size(total: int, share: float) -> int | None:
    """Return how many of ``total`` query tokens are taken, ``None`` if all."""
    tile = min(TILE, total)
    count = max(1, round(share * total / tile)) * tile if tile else 0
    return None if share >= 1 or count >= total else count


def sampled_tokens(total: int, size: int, start: torch.Tensor) -> QuerySample:
    """Return ``size`` of ``total`` tokens, whole tiles; ``start``: int64, from 0 to ``total - 1``.

    Raises:
        ValueError: ``size`` is not one of :func:`sample_size`.
    """
    if not 0 < size < total or size % min(TILE, total):
        raise ValueError(f"size must be that of sample_size for {total} tokens, got {size}")
    return QuerySample((_tiles(total, size, start.device) + start) % total, total / size)


@tensor_cache(8)
def _tiles(total: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the sample that starts at 0; tiles are at least their length apart."""
    tile = min(TILE, total)
    count = size // tile
    first = torch.arange(count, device=device) * total // count
    return (first[:, None] + torch.arange(tile, device=device)).flatten()


def draw_start(total: int, device: torch.device, group: Any = None) -> torch.Tensor:
    """Draw a start from torch's generator of the device, whose state Megatron saves and resumes.

    Args:
        total: query tokens.
        device: of the tokens.
        group: process group of ranks that take the same tokens, or ``None``.
    """
    start = torch.randint(total, (), device=device)
    if group is not None:
        torch.distributed.broadcast(start, group=group, group_src=0)
    return start
