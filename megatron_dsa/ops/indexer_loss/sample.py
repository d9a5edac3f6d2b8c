"""A random share of the query tokens, on which the indexer's loss is estimated without bias.

The loss is a sum over query tokens. They are cut into equal stretches, and each stretch gives a
tile of neighbours, at a random offset that is the same in all stretches. All tokens are equally
likely to be taken: the sum over the sample, times the number of tokens that each of it stands for,
is the whole loss in the mean over all offsets, and likewise its gradients. The number of tiles is
fixed, and with it all shapes.

Each token may be taught by a group of heads only, which follows from its position in its tile. A
token that is taken is equally likely to be at each position, so all groups teach it in the mean.
The loss's gradient is linear in the teacher, and so without bias; its value is convex in it, and so
larger than with all heads.
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

#: Neighbours that are taken together: kernels read the keys of a tile of queries at once.
TILE = 64
#: Taken tokens for which one range of visible slots is given to the host.
_RANGE = 32 * TILE


@dataclass(frozen=True, eq=False)
class QuerySample:
    """Query tokens of a loss.

    Attributes:
        tokens: int64 ``[n]``, all different, in ``parts`` parts of equal length. A part has the
            same positions of every tile. Tiles ascend; the last one may go on at token 0.
        total: tokens that they are taken from.
        parts: groups of heads; each group teaches a part.
        neighbours: tokens of a tile in a part.
    """

    tokens: torch.Tensor
    total: int
    parts: int = 1
    neighbours: int = TILE

    @property
    def factor(self) -> float:
        """Tokens that each of them stands for."""
        return self.total / len(self.tokens)

    def by_part(self) -> Iterator[QuerySample]:
        """Yield the parts, each a sample of its own."""
        for tokens in self.tokens.chunk(self.parts):
            yield QuerySample(tokens, self.total, 1, self.neighbours)

    def spread(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return ``[total, ...]`` with ``x [n, ...]`` of each tensor at its tokens, else 0."""
        if all(_takes_kernel(x) for x in tensors):
            from megatron_dsa.ops.indexer_loss.triton.sample import spread  # needs Triton

            return spread(self.tokens, self.total, TILE, self.parts, tensors)
        return [
            x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.tokens, x) for x in tensors
        ]

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of these query tokens, with all keys of ``whole``.

        Their positions are on the device: the host has bounds of many tokens together.
        """
        tokens = self.tokens
        start, end, position = select_tokens(tokens, whole.start, whole.end, whole.position)
        return Layout(
            num_queries=len(tokens),
            num_keys=whole.num_keys,
            start=start,
            end=end,
            position=position,
            key_rows=whole.key_rows,
            real=None if whole.real is None else whole.real[tokens],
            query_ranges=tuple(self._ranges(whole)),
            max_length=whole.max_length,
        )

    def _ranges(self, whole: Layout) -> Iterator[QueryRange]:
        """Yield ranges of a part's tokens with the slots that any token of their tiles sees."""
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
    """Return slots that cover what the query tokens ``[first, end)`` see."""
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
    """Return how many of ``total`` query tokens are taken, ``None`` if all."""
    if share >= 1 or total <= TILE:
        return None
    return min(max(1, round(share * total / TILE)), (total - 1) // TILE) * TILE


def sampled_tokens(total: int, size: int, offset: torch.Tensor, parts: int = 1) -> QuerySample:
    """Return ``size`` of ``total`` tokens, whole tiles; ``offset``: int64, from 0 to ``total - 1``.

    ``parts``: see :class:`QuerySample`.

    Raises:
        ValueError: ``size`` is not one of :func:`sample_size`, or tiles have no equal parts.
    """
    if not 0 < size < total or size % TILE:
        raise ValueError(f"size must be that of sample_size for {total} tokens, got {size}")
    if TILE % parts:
        raise ValueError(f"parts must divide the {TILE} tokens of a tile, got {parts}")
    if _takes_kernel(offset):
        from megatron_dsa.ops.indexer_loss.triton.sample import place_tiles  # needs Triton

        tokens = place_tiles(offset, total, size, TILE, parts)
    else:
        tiles = size // TILE
        # Stretch i begins at i * total / tiles.
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
    """Draw the number that :func:`sampled_tokens` takes, ``None`` if all tokens are taken.

    From torch's generator of the device, which Megatron saves and resumes.

    Args:
        total: query tokens.
        share: of them to take; rounded to whole tiles, at least one.
        device: of the tokens.
        group: process group of ranks that take the same tokens, or ``None``.
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
    """Draw query tokens, ``None`` if all; see :func:`draw_number` and :class:`QuerySample`."""
    size, number = sample_size(total, share), draw_number(total, share, device, group)
    return None if size is None or number is None else sampled_tokens(total, size, number, parts)
