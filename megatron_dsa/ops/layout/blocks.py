"""Which slots some query tokens see: bounds known on the host, and blocks of a layout."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class QueryRange:
    """Bounds, known on the host, of what some query tokens see.

    The i-th query of ``rows`` is at a position within ``slack`` of ``place + i * step``, counted
    from the slot ``origin``. It sees no slot behind its own and none before ``origin`` or ``origin
    + position + 1 - lookback``. If a slot stands for ``ratio`` positions
    (:mod:`megatron_dsa.ops.layout.compressed`), all but ``origin`` still count positions.

    Attributes:
        rows: slice of query tokens.
        origin: lowest slot that any of them sees.
        place: position of the first query.
        lookback: upper bound of the sequence length.
        ceiling: the number of slots there are.
        step: positions from one query to the next.
        slack: by how much a position may differ from that.
        ratio: positions that a slot stands for.
    """

    rows: slice
    origin: int
    place: int
    lookback: int
    ceiling: int
    step: int = 1
    slack: int = 0
    ratio: int = 1

    def __len__(self) -> int:
        return len(range(self.rows.start, self.rows.stop, self.rows.step))

    def bound(self, query: int) -> int:
        """Return how many slots query ``query`` sees at most; it never falls from one to the next.

        Where ``slack`` is 0 it follows from the query's place alone, whatever rows are beside it.
        """
        place = self.place + query * self.step + self.slack
        return min(place + 1, self.lookback) // self.ratio

    def cut(self, bound: int) -> tuple[QueryRange, ...]:
        """Return this query range in two: queries with a smaller :meth:`bound`, and the others."""
        count = len(self)
        first = bisect_left(range(count), bound, key=self.bound)
        if first in (0, count):
            return (self,)
        step = self.rows.step
        middle = self.rows.start + first * step
        return (
            replace(self, rows=slice(self.rows.start, middle, step)),
            replace(self, rows=slice(middle, self.rows.stop, step),
                    place=self.place + first * self.step),
        )  # fmt: skip

    def slots(self, begin: int, end: int) -> tuple[int, int]:
        """Return the slot range that covers everything queries ``[begin, end)`` may see."""
        first = self.place + begin * self.step - self.slack
        last = self.place + (end - 1) * self.step + self.slack
        lowest = self.origin + max(0, (first + 1 - self.lookback) // self.ratio)
        highest = min(self.origin + (last + 1) // self.ratio, self.ceiling)
        return min(lowest, highest), highest

    def covers(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return whether :meth:`slots` of each query covers what it sees: bool scalar.

        ``start`` and ``end`` are those of the layout.
        """
        start, end = start[self.rows], end[self.rows]
        place = self.place + self.step * torch.arange(len(self), device=start.device)
        reach = (place - self.slack + 1 - self.lookback).div(self.ratio, rounding_mode="floor")
        lowest = self.origin + reach.clamp_min(0)
        highest = self.origin + (place + self.slack + 1).div(self.ratio, rounding_mode="floor")
        inside = (start >= lowest) & (end <= highest.clamp_max(self.ceiling))
        return (inside | (start == end)).all()


@dataclass(frozen=True)
class Block:
    """Some query tokens of one query range with the slots ``[lo, hi)`` that cover what they see.

    Attributes:
        ratio: positions behind a slot.
        bound: how many slots the first query sees at most (:meth:`QueryRange.bound`).
    """

    rows: slice
    lo: int
    hi: int
    ratio: int = 1
    bound: int = 0

    @property
    def width(self) -> int:
        return self.hi - self.lo

    @property
    def key(self) -> tuple[int, ...]:
        """What tells blocks of a layout apart."""
        return self.rows.start, self.rows.stop, self.rows.step, self.lo, self.hi


@dataclass(frozen=True, eq=False)
class Seen:
    """What the queries of a block see: the i-th one the columns ``[start[i], end[i])``.

    Attributes:
        start, end: int32 ``[tokens]``, contiguous, ``start <= end``, both within ``[0, width]`` of
            the block. A column is a slot, counted from the block's first.
    """

    start: torch.Tensor
    end: torch.Tensor

    def columns(self, width: int) -> torch.Tensor:
        """Return bool ``[tokens, width]``: which columns each query sees."""
        columns = torch.arange(width, device=self.start.device)
        return (columns >= self.start[:, None]) & (columns < self.end[:, None])

    def first(self, count: int) -> torch.Tensor:
        """Return int32 ``[tokens, count]``: the first columns that each query sees, then -1."""
        place = torch.arange(count, dtype=torch.int32, device=self.start.device)
        columns = self.start[:, None] + place
        return torch.where(columns < self.end[:, None], columns, -1)
