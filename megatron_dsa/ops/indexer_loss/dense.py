"""Dense indexer loss in two streaming passes over tiles of (query tokens x slots).

The first pass computes log-sum-exps, the second loss and gradients. Memory is linear in the number
of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.indexer_loss.spec import (
    DenseLossInputs,
    ExpandedKeys,
    IndexerLoss,
    LatentKeys,
)
from megatron_dsa.ops.indexer_loss.torch import Gradients
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout, QueryRange, Seen


class TileFunctions(Protocol):
    """Functions that an implementation provides for tiles of ``r`` queries and ``w`` key slots.

    ``x`` has the tile's index queries, weights and keys; ``seen`` has each token's visible columns.
    Results are fp32 (fp64). Teachers and score gradients may have any layout; ranks add teachers
    elementwise.
    """

    #: Maximum query tokens and key slots of a tile.
    shape: tuple[int, int]

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        """Return the index keys ``[w, DI]``."""

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        """Return the log-sum-exp ``[r]`` of the visible index scores, ``-inf`` without keys."""

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        """Return the log-sum-exp ``[H, r]`` of the scaled attention scores."""

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return ``sum_h exp(scale * q_h . k_h - lse_h)``, 0 at hidden keys."""

    def loss(
        self, x: IndexerInputs, seen: Seen, teacher: torch.Tensor, lse: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the KL sum and optionally the score gradients; may overwrite the teacher."""

    def backward(
        self, x: IndexerInputs, seen: Seen, dscores: torch.Tensor, dq: torch.Tensor,
        dweights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the key gradient ``[w, DI]``; add to the gradients of the query tokens.

        ``dq [r, HI, DI]`` excludes the head weights. ``dweights [r, HI]`` may be left to
        :meth:`finish`.
        """

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        """Multiply a block's ``dq`` by head weights into ``out``; write missing ``dweights``.

        ``x`` has all keys; ``seen`` has visible slots. ``dq`` may be overwritten.
        """


def dense_loss(inputs: DenseLossInputs, functions: TileFunctions) -> IndexerLoss:
    x = inputs.indexer
    value = x.q.new_zeros((), dtype=accumulation_dtype(x.q.dtype))
    grads = Gradients(x) if inputs.want_gradients else None
    longest, width = functions.shape
    for block in query_blocks(inputs.layout, longest):
        tiles = list(block.tiles(width))
        if tiles:
            _BlockLoss(inputs, functions, block.tokens, tiles).add(value, grads)
    return IndexerLoss(value, None if grads is None else grads.result())


@dataclass(frozen=True)
class _BlockLoss:
    inputs: DenseLossInputs
    functions: TileFunctions
    tokens: slice
    tiles: list[Tile]

    def add(self, loss: torch.Tensor, grads: Gradients | None) -> None:
        inputs, functions, tokens = self.inputs, self.functions, self.tokens
        x, layout = inputs.indexer, inputs.layout
        seen = Seen(layout.start[tokens], layout.end[tokens])
        student_lse, lse = self._log_sum_exps(seen)
        other = None if inputs.other_lse is None else inputs.other_lse[tokens].t().to(lse.dtype)
        lse, has_mass = normalised_lse(lse, other, inputs.head_group)
        seen = Seen(seen.start, torch.where(has_mass, seen.end, seen.start))
        dq = None
        if grads is not None:
            dq = x.q.new_zeros(student_lse.shape + x.q.shape[1:], dtype=student_lse.dtype)
        for tile, here, teacher in self._teachers(seen, lse):
            part, inside = self._student(tile), tile.inside
            value, dscores = functions.loss(
                part, here, teacher, student_lse[inside], inputs.want_gradients
            )
            loss += value
            if grads is not None:
                assert dq is not None and dscores is not None
                dweights = grads.weights[tile.tokens]
                dk = functions.backward(part, here, dscores, dq[inside], dweights)
                grads.add_to_slots(layout, tile.slots, dk)
        if grads is not None:
            assert dq is not None
            part = IndexerInputs(x.q[tokens], x.k, x.weights[tokens], x.relu)
            functions.finish(part, seen, dq, grads.q[tokens], grads.weights[tokens])

    def _student(self, tile: Tile) -> IndexerInputs:
        x = self.inputs.indexer
        keys = self.functions.index_keys(self.inputs.layout, tile.slots)
        return IndexerInputs(x.q[tile.tokens], keys, x.weights[tile.tokens], x.relu)

    def _log_sum_exps(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, q, index_q = self.inputs, self.inputs.q, self.inputs.indexer.q
        count, dtype = seen.start.shape[0], accumulation_dtype(q.dtype)
        student = index_q.new_full((count,), float("-inf"), dtype=accumulation_dtype(index_q.dtype))
        if inputs.lse is None:
            teacher = q.new_full((q.shape[1], count), float("-inf"), dtype=dtype)
        else:
            teacher = inputs.lse[self.tokens].t().to(dtype)
        for tile in self.tiles:
            here = _seen_columns(seen, tile)
            _join(student[tile.inside], self.functions.student_lse(self._student(tile), here))
            if inputs.lse is None:
                keys = take(inputs.k, inputs.layout, tile.slots)
                part = self.functions.teacher_lse(q[tile.tokens], keys, here)
                _join(teacher[:, tile.inside], part)
                del keys, part
        return student, teacher

    def _teachers(self, seen: Seen, lse: torch.Tensor) -> Iterator[tuple[Tile, Seen, torch.Tensor]]:
        """Yield tiles with normalised teachers, overlapping each all-reduce with the next tile."""
        inputs, group, last = self.inputs, self.inputs.head_group, None
        for tile in self.tiles:
            here = _seen_columns(seen, tile)
            keys = take(inputs.k, inputs.layout, tile.slots)
            teacher = self.functions.teacher(inputs.q[tile.tokens], keys, lse[:, tile.inside], here)
            del keys
            if group is None:
                yield tile, here, teacher
                continue
            work = torch.distributed.all_reduce(teacher, group=group, async_op=True)
            if last is not None:
                yield _reduced(*last)
            last = tile, here, teacher, work
        if last is not None:
            yield _reduced(*last)


def _reduced(tile: Tile, here: Seen, teacher: torch.Tensor, work):
    work.wait()
    return tile, here, teacher


def _seen_columns(seen: Seen, tile: Tile) -> Seen:
    low, width = tile.slots.start, tile.slots.stop - tile.slots.start
    start, end = (x[tile.inside] - low for x in (seen.start, seen.end))
    return Seen(start.clamp_(0, width), end.clamp_(0, width))


def take(keys, layout: Layout, slots: slice) -> Any:
    if isinstance(keys, LatentKeys):
        return replace(keys, latents=take(keys.latents, layout, slots))
    if isinstance(keys, ExpandedKeys):
        if layout.key_indices is not None:
            keys = replace(keys, kv=keys.nope, v_dim=0)
        kv, k_pe = (take(x, layout, slots) for x in (keys.kv, keys.k_pe))
        return replace(keys, kv=kv, k_pe=k_pe)
    if layout.key_indices is None:
        return keys[slots]
    return keys.index_select(0, layout.key_indices[slots])


def _join(lse: torch.Tensor, part: torch.Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part))


def normalised_lse(
    lse: torch.Tensor, other_lse: torch.Tensor | None, group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``lse [H, r]`` that normalises teachers to 1, and a mask of tokens with mass.

    ``other_lse`` is the rest of the denominator; heads are sharded over ``group``.
    """
    total = lse if other_lse is None else torch.logaddexp(lse, other_lse)
    # Subtracting -inf from -inf would give NaN.
    mass = torch.where(lse == float("-inf"), 0.0, (lse - total).exp_()).sum(0)
    if group is not None:
        torch.distributed.all_reduce(mass, group=group)
    # Count NaN as mass, so that NaN reaches the loss.
    return total + mass.log(), mass != 0


@dataclass(frozen=True)
class Tile:
    tokens: slice
    inside: slice
    slots: slice


@dataclass(frozen=True)
class QueryBlock:
    query_range: QueryRange
    begin: int
    end: int

    @property
    def tokens(self) -> slice:
        return self.query_range.tokens_of(self.begin, self.end)

    def tiles(self, width: int) -> Iterator[Tile]:
        """Cut the visible slots into tiles of at most ``width`` slots.

        Visible ranges ascend with queries: a tile ends before the first query past its slots.
        """
        queries = range(self.begin, self.end)
        lowest, highest = self.query_range.slots(self.begin, self.end)
        for low in range(lowest, highest, width):
            high = min(low + width, highest)
            begin = self.begin + bisect_left(queries, True, key=lambda i: self._sees(i)[1] > low)
            end = self.begin + bisect_left(queries, True, key=lambda i: self._sees(i)[0] >= high)
            if begin < end:
                inside = slice(begin - self.begin, end - self.begin)
                yield Tile(self.query_range.tokens_of(begin, end), inside, slice(low, high))

    def _sees(self, query: int) -> tuple[int, int]:
        return self.query_range.slots(query, query + 1)


def query_blocks(layout: Layout, longest: int) -> Iterator[QueryBlock]:
    for query_range in layout.query_ranges:
        for begin in range(0, len(query_range), longest):
            yield QueryBlock(query_range, begin, min(begin + longest, len(query_range)))


@dataclass(frozen=True)
class TileBytes:
    """Temporary bytes per query-key pair, query token, key slot and tile."""

    pair: int
    token: int
    slot: int
    fixed: int

    def __call__(self, tokens: int, width: int) -> int:
        return tokens * width * self.pair + tokens * self.token + width * self.slot + self.fixed

    def fitting_shape(self, budget: int, longest: int, shortest: int = 1) -> tuple[int, int]:
        """Return a tile size (query tokens, key slots) that fits the workspace.

        Shrink slots first, to a quarter of the tokens: expanding keys once per tile is cheap with
        several hundred tokens.
        """
        tokens = width = longest
        while self(tokens, width) > budget and (tokens, width) != (shortest, shortest):
            if 4 * width > tokens and width > shortest:
                width //= 2
            else:
                tokens //= 2
        while width < longest and self(tokens, 2 * width) <= budget:
            width *= 2
        return tokens, width


def gathered_bytes(k: ExpandedKeys) -> int:
    heads, nope = k.nope.shape[1:]
    return (heads * nope + k.k_pe.shape[1]) * k.kv.element_size()
