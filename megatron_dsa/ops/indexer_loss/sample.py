"""A random share of the query tokens, on which the indexer's loss is estimated without bias.

The loss is a sum over query tokens. They are cut into equal parts, and each part gives a tile of
neighbours, at a random place that is the same in all parts. All tokens are equally likely to be
taken: the sum over the taken ones, times how many tokens each of them stands for, is the whole loss
in the mean over all places, and likewise its gradients. The number of tiles is fixed, and with it
all shapes.
"""

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
        tokens: int64 ``[n]``, all different. Tiles ascend; the last one may go on at token 0.
        total: tokens that they are taken from.
    """

    tokens: torch.Tensor
    total: int

    @property
    def factor(self) -> float:
        """Tokens that each of them stands for."""
        return self.total / len(self.tokens)

    def spread(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return ``[total, ...]`` with ``x [n, ...]`` of each tensor at its tokens, else 0."""
        if all(_takes_kernel(x) for x in tensors):
            from megatron_dsa.ops.indexer_loss.triton.sample import spread  # needs Triton

            return spread(self.tokens, self.total, TILE, tensors)
        return [
            x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.tokens, x) for x in tensors
        ]

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of these query tokens, with all keys of ``whole``.

        Their positions are on the device: the host knows bounds of what many see together.
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
        """Yield ranges of taken tokens with the slots that any token of their parts sees."""
        tile = min(TILE, self.total)
        parts = len(self.tokens) // tile
        for some in slices(len(self.tokens), _RANGE):
            first = some.start // tile * self.total // parts
            end = -(-some.stop // tile * self.total // parts) + tile - 1
            seen = [_seen(whole, first, end)]
            if end > self.total:
                seen.append(_seen(whole, 0, end - self.total))
            low, high = min(lo for lo, _ in seen), max(hi for _, hi in seen)
            yield QueryRange(some, low, 0, high - low, high, step=0, slack=high - low)


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
    tile = min(TILE, total)
    count = max(1, round(share * total / tile)) * tile if tile else 0
    return None if share >= 1 or count >= total else count


def sampled_tokens(total: int, size: int, place: torch.Tensor) -> QuerySample:
    """Return ``size`` of ``total`` tokens, whole tiles; ``place``: int64, from 0 to ``total - 1``.

    Raises:
        ValueError: ``size`` is not one of :func:`sample_size`.
    """
    tile = min(TILE, total)
    if not 0 < size < total or size % tile:
        raise ValueError(f"size must be that of sample_size for {total} tokens, got {size}")
    parts = size // tile
    if _takes_kernel(place):
        from megatron_dsa.ops.indexer_loss.triton.sample import place_tiles  # needs Triton

        return QuerySample(place_tiles(place, total, size, tile), total)
    # Part i begins at i * total / parts; all sums of its first token and a place differ.
    begins, inside = _parts(total, parts, tile, place.device)
    return QuerySample((((begins + place) // parts + inside) % total).flatten(), total)


@tensor_cache(8)
def _parts(total: int, parts: int, tile: int, device: torch.device):
    begins = torch.arange(parts, device=device)[:, None] * total
    return begins, torch.arange(tile, device=device)


def draw_sample(
    total: int, share: float, device: torch.device, group: Any = None
) -> QuerySample | None:
    """Draw query tokens from torch's generator of the device, which Megatron saves and resumes.

    Args:
        total: query tokens.
        share: of them to take; rounded to whole tiles, at least one.
        device: of the tokens.
        group: process group of ranks that take the same tokens, or ``None``.

    Returns:
        ``None`` if all tokens are taken.
    """
    size = sample_size(total, share)
    if size is None:
        return None
    place = torch.randint(total, (), device=device)
    if group is not None:
        torch.distributed.broadcast(place, group=group, group_src=0)
    return sampled_tokens(total, size, place)
