"""Random sample of query tokens for unbiased estimates of the indexer's loss.

Equal stretches of query tokens each contribute a tile of adjacent tokens at the same random offset:
all tokens are equally likely, and shapes are fixed. With ``parts``, one group of heads teaches each
token: the gradient, linear in the teacher, stays unbiased; the loss, convex in the teacher, grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.common.capture import tensor_cache
from megatron_dsa.ops.common.scaling import has_triton
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.layout.layout import Layout, QueryRange

#: Number of adjacent tokens per sampled tile, whose queries share keys.
TILE = 64
_RANGE = 32 * TILE


@dataclass(frozen=True, eq=False)
class QuerySample:
    """Query tokens sampled for the indexer loss.

    Attributes:
        tokens: int64 ``[n]``, unique, in ``parts`` equal parts, each with the same offsets of every
            tile. Tiles ascend; the last may wrap around.
        parts: number of head groups; each teaches one part.
        neighbours: number of adjacent tokens per tile and part.
    """

    tokens: torch.Tensor
    total: int
    parts: int = 1
    neighbours: int = TILE

    @property
    def factor(self) -> float:
        return self.total / len(self.tokens)

    def by_part(self) -> Iterator[QuerySample]:
        for tokens in self.tokens.chunk(self.parts):
            yield QuerySample(tokens, self.total, 1, self.neighbours)

    def spread(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if all(_takes_kernel(x) for x in tensors):
            from megatron_dsa.ops.indexer_loss.triton.sample import spread

            return spread(self.tokens, self.total, TILE, self.parts, tensors)
        return [
            x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.tokens, x) for x in tensors
        ]

    def layout(self, whole: Layout) -> Layout:
        tokens = self.tokens
        start, end, position = select_tokens(tokens, whole.start, whole.end, whole.position)
        return Layout(
            num_queries=len(tokens),
            num_keys=whole.num_keys,
            start=start,
            end=end,
            position=position,
            key_indices=whole.key_indices,
            real=None if whole.real is None else whole.real[tokens],
            query_ranges=tuple(self._ranges(whole)),
            max_length=whole.max_length,
        )

    def _ranges(self, whole: Layout) -> Iterator[QueryRange]:
        tiles = len(self.tokens) // self.neighbours
        for some in slices(tiles, max(1, _RANGE // self.neighbours)):
            first = some.start * self.total // tiles
            end = -(-some.stop * self.total // tiles) + TILE - 1
            seen = [_seen(whole, first, end)]
            if end > self.total:
                seen.append(_seen(whole, 0, end - self.total))
            low, high = min(lo for lo, _ in seen), max(hi for _, hi in seen)
            taken = slice(some.start * self.neighbours, some.stop * self.neighbours, 1)
            yield QueryRange(taken, low, 0, high - low, high, step=0, slack=high - low)


def _seen(layout: Layout, first: int, end: int) -> tuple[int, int]:
    low, high = layout.num_keys, 0
    for query_range in layout.query_ranges:
        start, step = query_range.tokens.start, query_range.tokens.step
        begin = max(0, -(-(first - start) // step))
        stop = min(len(query_range), -(-(end - start) // step))
        if begin < stop:
            lo, hi = query_range.slots(begin, stop)
            low, high = min(low, lo), max(high, hi)
    return min(low, high), high


def _takes_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and has_triton()


def sample_size(total: int, share: float) -> int | None:
    if share >= 1 or total <= TILE:
        return None
    return min(max(1, round(share * total / TILE)), (total - 1) // TILE) * TILE


def sampled_tokens(total: int, size: int, offset: torch.Tensor, parts: int = 1) -> QuerySample:
    """Return a sample of ``size`` tokens; ``offset`` is int64, from 0 to ``total - 1``.

    Raises:
        ValueError: ``size`` is not from :func:`sample_size`, or ``parts`` does not divide a tile.
    """
    if not 0 < size < total or size % TILE:
        raise ValueError(f"size must be that of sample_size for {total} tokens, got {size}")
    if TILE % parts:
        raise ValueError(f"parts must divide the {TILE} tokens of a tile, got {parts}")
    if _takes_kernel(offset):
        from megatron_dsa.ops.indexer_loss.triton.sample import tile_tokens

        tokens = tile_tokens(offset, total, size, TILE, parts)
    else:
        tiles = size // TILE
        begins, inside = _stretches(total, tiles, parts, offset.device)
        tokens = (((begins + offset) // tiles + inside) % total).flatten()
    return QuerySample(tokens, total, parts, TILE // parts)


@tensor_cache(8)
def _stretches(total: int, tiles: int, parts: int, device: torch.device):
    begins = torch.arange(tiles, device=device)[:, None] * total
    return begins, torch.arange(TILE, device=device).view(parts, 1, -1)


def draw_number(
    total: int, share: float, device: torch.device, group: Any = None
) -> torch.Tensor | None:
    """Draw the offset for :func:`sampled_tokens`; return ``None`` if the loss uses all tokens.

    Use the device's torch generator, which Megatron saves and resumes; broadcast over ``group``.
    """
    if sample_size(total, share) is None:
        return None
    number = torch.randint(total, (), device=device)
    if group is not None:
        torch.distributed.broadcast(number, group=group, group_src=0)
    return number


def draw_sample(
    total: int, share: float, device: torch.device, group: Any = None, parts: int = 1
) -> QuerySample | None:
    size, number = sample_size(total, share), draw_number(total, share, device, group)
    return None if size is None or number is None else sampled_tokens(total, size, number, parts)
