"""Tiles of (query tokens x slots) that cover every visible pair, and how large they may be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.indexer_loss.inputs import DenseLossInputs, ExpandedKeys, LatentKeys
from megatron_dsa.ops.layout.layout import Layout, QueryRange

#: Heads handled at a time; smaller blocks need less memory, larger ones are faster.
HEADS_AT_ONCE = 8
#: Longest edge of a tile. Matrix products gain nothing from longer ones, and a tile on the diagonal
#: does work for pairs that do not exist.
LONGEST_EDGE = 1024


@dataclass(frozen=True)
class Tile:
    """Some query tokens and some slots.

    Attributes:
        rows: slice of the query tensor.
        inside: the same rows, counted from the first of their query block.
        slots: slice of the keys in slot order.
    """

    rows: slice
    inside: slice
    slots: slice


@dataclass(frozen=True)
class QueryBlock:
    """The queries ``[begin, end)`` of a window."""

    window: QueryRange
    begin: int
    end: int

    @property
    def rows(self) -> slice:
        """Their slice of the query tensor."""
        return self._rows(self.begin, self.end)

    def _rows(self, begin: int, end: int) -> slice:
        first, step = self.window.rows.start, self.window.rows.step
        return slice(first + begin * step, first + (end - 1) * step + 1, step)

    def tiles(self, width: int) -> Iterator[Tile]:
        """Cut what these queries may see into tiles of at most ``width`` slots.

        The bounds of a window rise from query to query: a tile leaves out the queries before the
        first that reaches its slots, and those from the first on that is past them.
        """
        queries = range(self.begin, self.end)
        lowest, highest = self.window.slots(self.begin, self.end)
        for low in range(lowest, highest, width):
            high = min(low + width, highest)
            begin = self.begin + bisect_left(queries, True, key=lambda i: self._sees(i)[1] > low)
            end = self.begin + bisect_left(queries, True, key=lambda i: self._sees(i)[0] >= high)
            if begin < end:
                inside = slice(begin - self.begin, end - self.begin)
                yield Tile(self._rows(begin, end), inside, slice(low, high))

    def _sees(self, query: int) -> tuple[int, int]:
        return self.window.slots(query, query + 1)


def query_blocks(layout: Layout, rows: int) -> Iterator[QueryBlock]:
    """Cut the windows of ``layout`` into blocks of at most ``rows`` queries."""
    for window in layout.query_ranges:
        for begin in range(0, len(window), rows):
            yield QueryBlock(window, begin, min(begin + rows, len(window)))


def tile_shape(inputs: DenseLossInputs) -> tuple[int, int]:
    """Return how many query tokens and slots a tile of the torch implementation may have."""
    return fitting_shape(TileBytes.of(inputs), inputs.workspace_bytes, LONGEST_EDGE)


def fitting_shape(
    costs: TileBytes, budget: int, longest: int, shortest: int = 1
) -> tuple[int, int]:
    """Return how many query tokens and how many slots a tile may have to fit the workspace.

    Edges are ``longest`` at most and never below ``shortest``. Rows are given up last, up to four
    per slot: the keys of a tile are expanded once for all its tokens, which is cheap from several
    hundred rows on.
    """
    rows = width = longest
    while costs(rows, width) > budget and (rows, width) != (shortest, shortest):
        if 4 * width > rows and width > shortest:
            width //= 2
        else:
            rows //= 2
    while width < longest and costs(rows, 2 * width) <= budget:
        width *= 2
    return rows, width


@dataclass(frozen=True)
class TileBytes:
    """Temporary bytes of the loss: per pair of a tile, per query token, per slot, and at all."""

    pair: int
    row: int
    slot: int
    fixed: int

    def __call__(self, rows: int, width: int) -> int:
        return rows * width * self.pair + rows * self.row + width * self.slot + self.fixed

    @classmethod
    def of(cls, inputs: DenseLossInputs) -> TileBytes:
        """Count what is alive at the same time in :mod:`~.indexer_loss.torch_dense`."""
        x, q, k = inputs.indexer, inputs.q, inputs.k
        gathers = inputs.layout.key_rows is not None
        (index_heads, index_dim), (all_heads, dim) = x.q.shape[1:], q.shape[1:]
        some_index_heads = min(HEADS_AT_ONCE, index_heads)
        heads = min(HEADS_AT_ONCE, all_heads)
        index_item, item = x.q.element_size(), q.element_size()
        acc, index_copy = _accumulator(x.q)
        teacher_acc, copy = _accumulator(q)
        widest = max(acc, teacher_acc)
        # The products of some heads: the teacher's; the student's, twice, as one is formed before
        # the last is dropped; or the student's with a mask and their gradient.
        products = max(
            heads * teacher_acc,
            2 * some_index_heads * acc,
            some_index_heads * (acc + 1 + index_item + index_copy),
        )
        # Besides: masks, teachers (one in use, one being reduced), scores and their gradient.
        pair = products + 4 + 4 * widest + index_item
        row = index_heads * index_dim * acc  # dq
        row += some_index_heads * index_dim * (2 * index_item + 2 * acc + index_copy)
        row += heads * dim * (item + copy) + 6 * all_heads * teacher_acc  # queries, log-sum-exps
        slot = index_dim * (index_item * gathers + index_copy + acc)
        fixed = 0
        if isinstance(k, ExpandedKeys):
            slot += gathered_bytes(k) * gathers + heads * dim * item
        elif isinstance(k, LatentKeys):
            own = k.w_uk.shape[1]
            slot += k.latents.shape[1] * item * gathers + heads * (own + dim) * item
            fixed = 0 if k.w_uk.is_contiguous() else heads * own * k.w_uk.shape[2] * item
        else:
            slot += k.shape[1] * dim * item * gathers
        slot += min(heads, all_heads) * dim * copy
        return cls(pair, row, slot, fixed)


def gathered_bytes(k: ExpandedKeys) -> int:
    """Return the bytes of a copy of one token's keys, without values (:func:`.dense.take`)."""
    heads, own = k.own.shape[1:]
    return (heads * own + k.k_pe.shape[1]) * k.kv.element_size()


def _accumulator(x: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of ``x``'s accumulator and of the copy that a product makes of an operand.

    Without matrix units for 16 bits (``bmm`` of ``ops/common/arithmetic.py``), it is widened.
    """
    acc = accumulation_dtype(x.dtype).itemsize
    return acc, acc if x.element_size() < acc and not x.is_cuda else 0
