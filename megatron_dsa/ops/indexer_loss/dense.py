"""The dense indexer loss as two streaming passes over tiles of (query tokens x slots).

The first pass computes the log-sum-exp of the student's scores, and of the teacher's unless it is
given. The second computes teacher, student, loss and gradients tile by tile. Memory is linear in
the number of tokens; keys of all heads are expanded for one tile and a few heads at a time.

:class:`TileFunctions` compute a tile: in torch (:mod:`.torch_dense`) or in kernels
(:mod:`.triton.dense`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.indexer_loss.api import with_backward
from megatron_dsa.ops.indexer_loss.spec import DenseLossInputs, ExpandedKeys, LatentKeys
from megatron_dsa.ops.indexer_loss.torch import Gradients
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout, QueryRange, Seen


class TileFunctions(Protocol):
    """Functions of an implementation on a tile of ``r`` query tokens and ``w`` slots.

    ``x`` holds the index queries and weights of the tokens and the index keys of the slots;
    ``seen`` counts columns of the tile. Scores, log-sum-exps and gradients are fp32 (fp64 for fp64
    inputs). An implementation chooses layout and dtype of teachers and score gradients; a sum over
    ranks adds teachers up as they are.
    """

    #: Query tokens and slots that a tile may have.
    shape: tuple[int, int]

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        """Return the index keys ``[w, DI]`` of some slots."""

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        """Return the log-sum-exp ``[r]`` of the index scores, ``-inf`` where nothing is seen."""

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        """Return the log-sum-exp ``[H, r]`` of the scaled attention scores of every head."""

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return ``sum_h exp(scale * q_h . k_h - lse_h)``, 0 where it is not seen.

        ``lse [H, r]`` may be anything for tokens that see nothing.
        """

    def loss(
        self, x: IndexerInputs, seen: Seen, teacher: torch.Tensor, lse: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the KL sum of a tile (scalar) and, if asked for, the gradient on its scores.

        ``lse [r]`` is the student's. The teacher may be overwritten.
        """

    def backward(
        self, x: IndexerInputs, seen: Seen, dscores: torch.Tensor, dq: torch.Tensor,
        dweights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the gradient of the keys ``[w, DI]``; add to the tokens' gradients.

        ``dq [r, HI, DI]`` is left without its factor, the head weights, which is the same for all
        keys. ``dweights [r, HI]`` may be left to :meth:`finish`.
        """

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write ``dq`` of a block of queries times its factor into ``out``, and ``dweights`` if
        :meth:`backward` has not.

        ``x`` has all keys; ``seen`` counts slots. ``dq`` may be overwritten.
        """


def dense_loss(
    inputs: DenseLossInputs, functions: Callable[[DenseLossInputs], TileFunctions]
) -> torch.Tensor:
    """Return the KL sum over all visible keys (scalar), differentiable in the indexer's inputs."""

    def run(want_gradients: bool):
        grads = Gradients(inputs.indexer) if want_gradients else None
        loss = _kl_sum(inputs, functions(inputs), grads)
        return loss, None if grads is None else grads.result()

    return with_backward(inputs.indexer, run)


def _kl_sum(
    inputs: DenseLossInputs, functions: TileFunctions, grads: Gradients | None
) -> torch.Tensor:
    # Functions see plain tensors: on their own they would be taken for part of an autograd graph.
    inputs = replace(inputs, indexer=inputs.indexer.detach())
    q = inputs.indexer.q
    loss = q.new_zeros((), dtype=accumulation_dtype(q.dtype))
    rows, width = functions.shape
    for block in query_blocks(inputs.layout, rows):
        tiles = list(block.tiles(width))
        if tiles:
            _Block(inputs, functions, block, tiles).add(loss, grads)
    return loss


@dataclass(frozen=True)
class _Block:
    """Some query tokens of a window, with tiles that cover what they see."""

    given: DenseLossInputs
    functions: TileFunctions
    block: QueryBlock
    tiles: list[Tile]

    def add(self, loss: torch.Tensor, grads: Gradients | None) -> None:
        """Add the KL sum of these tokens to ``loss``, and their gradients to ``grads``."""
        arguments, functions, rows = self.given, self.functions, self.block.rows
        x, layout = arguments.indexer, arguments.layout
        seen = Seen(layout.start[rows], layout.end[rows])
        student_lse, lse = self._log_sum_exps(seen)
        other = None if arguments.other_lse is None else arguments.other_lse[rows].t().to(lse.dtype)
        lse, has_mass = normalised_lse(lse, other, arguments.head_group)
        # A token without a teacher has neither loss nor gradient, as if it saw nothing.
        seen = Seen(seen.start, torch.where(has_mass, seen.end, seen.start))
        dq = None
        if grads is not None:
            dq = x.q.new_zeros(student_lse.shape + x.q.shape[1:], dtype=student_lse.dtype)
        for tile, here, teacher in self._teachers(seen, lse):
            inputs, inside = self._inputs(tile), tile.inside
            value, dscores = functions.loss(
                inputs, here, teacher, student_lse[inside], grads is not None
            )
            loss += value
            if grads is not None:
                assert dq is not None and dscores is not None
                dk = functions.backward(inputs, here, dscores, dq[inside], grads.weights[tile.rows])
                grads.add_to_slots(layout, tile.slots, dk)
        if grads is not None:
            assert dq is not None
            inputs = IndexerInputs(x.q[rows], x.k, x.weights[rows], x.relu)
            functions.finish(inputs, seen, dq, grads.q[rows], grads.weights[rows])

    def _inputs(self, tile: Tile) -> IndexerInputs:
        x = self.given.indexer
        keys = self.functions.index_keys(self.given.layout, tile.slots)
        return IndexerInputs(x.q[tile.rows], keys, x.weights[tile.rows], x.relu)

    def _log_sum_exps(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the student's ``[r]`` and the teacher's ``[H, r]``, which may be given."""
        inputs, q = self.given, self.given.q
        rows, index_q = seen.start.shape[0], inputs.indexer.q
        dtype = accumulation_dtype(q.dtype)
        student = index_q.new_full((rows,), float("-inf"), dtype=accumulation_dtype(index_q.dtype))
        if inputs.lse is None:
            teacher = q.new_full((q.shape[1], rows), float("-inf"), dtype=dtype)
        else:
            teacher = inputs.lse[self.block.rows].t().to(dtype)
        for tile in self.tiles:
            here = _seen_columns(seen, tile)
            _join(student[tile.inside], self.functions.student_lse(self._inputs(tile), here))
            if inputs.lse is None:
                keys = take(inputs.k, inputs.layout, tile.slots)
                _join(teacher[:, tile.inside], self.functions.teacher_lse(q[tile.rows], keys, here))
        return student, teacher

    def _teachers(self, seen: Seen, lse: torch.Tensor) -> Iterator[tuple[Tile, Seen, torch.Tensor]]:
        """Yield every tile with its visibility and its normalised teacher.

        The sum over ranks of one tile runs under the computation of the next.
        """
        inputs, group, last = self.given, self.given.head_group, None
        for tile in self.tiles:
            here = _seen_columns(seen, tile)
            keys = take(inputs.k, inputs.layout, tile.slots)
            teacher = self.functions.teacher(inputs.q[tile.rows], keys, lse[:, tile.inside], here)
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
    """Return the keys of some slots: a view, or a copy of no more than these tokens."""
    if isinstance(keys, LatentKeys):
        return replace(keys, latents=take(keys.latents, layout, slots))
    if isinstance(keys, ExpandedKeys):
        if layout.key_rows is not None:
            keys = replace(keys, kv=keys.nope, v_dim=0)  # a copy leaves values out
        kv, k_pe = (take(x, layout, slots) for x in (keys.kv, keys.k_pe))
        return replace(keys, kv=kv, k_pe=k_pe)
    if layout.key_rows is None:
        return keys[slots]
    return keys.index_select(0, layout.key_rows[slots])


def _join(lse: torch.Tensor, part: torch.Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part))


def normalised_lse(
    lse: torch.Tensor, other_lse: torch.Tensor | None, group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``lse`` with which the teacher of a token, summed over heads and ranks, sums to 1.

    Args:
        lse: ``[H, r]``, over the visible keys.
        other_lse: ``[H, r]``, of the rest of the softmax's denominator, or ``None``.
        group: process group over which heads are sharded, or ``None``.

    Returns:
        ``[H, r]``, defined for tokens with mass on visible keys, and bool ``[r]``: which these are.
    """
    total = lse if other_lse is None else torch.logaddexp(lse, other_lse)
    # Without keys and without others, -inf - -inf would be NaN.
    mass = torch.where(lse == float("-inf"), 0.0, (lse - total).exp_()).sum(0)
    if group is not None:
        torch.distributed.all_reduce(mass, group=group)
    # NaN counts as mass, so that the loss shows it.
    return total + mass.log(), mass != 0


@dataclass(frozen=True)
class Tile:
    """Some query tokens and some slots.

    Attributes:
        rows: slice of the query tokens.
        inside: the same tokens, counted from the first of their query block.
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
        """Their slice of the query tokens."""
        return self._rows(self.begin, self.end)

    def _rows(self, begin: int, end: int) -> slice:
        first, step = self.window.rows.start, self.window.rows.step
        return slice(first + begin * step, first + (end - 1) * step + 1, step)

    def tiles(self, width: int) -> Iterator[Tile]:
        """Cut the slots that these queries may see into tiles of at most ``width`` slots.

        The bounds of a window rise from query to query: a tile begins with the first query that
        reaches its slots, and ends before the first that is past them.
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
    for window in layout.query_ranges:
        for begin in range(0, len(window), rows):
            yield QueryBlock(window, begin, min(begin + rows, len(window)))


def fitting_shape(
    costs: TileBytes, budget: int, longest: int, shortest: int = 1
) -> tuple[int, int]:
    """Return how many query tokens and how many slots a tile may have to fit the workspace.

    Edges are ``longest`` at most and never below ``shortest``. Tokens are given up last, up to four
    per slot: the keys of a tile are expanded once for all its tokens, which is cheap from several
    hundred tokens on.
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


def gathered_bytes(k: ExpandedKeys) -> int:
    """Return the bytes of a copy of one token's keys, without values (:func:`.dense.take`)."""
    heads, nope = k.nope.shape[1:]
    return (heads * nope + k.k_pe.shape[1]) * k.kv.element_size()
