"""The dense indexer loss as two streaming passes over tiles of (query tokens x keys).

The first pass forms the log-sum-exp of the student's scores, and of the teacher's unless it is
given. The second forms teacher, student, loss and gradients tile by tile. Memory is linear in the
number of tokens; keys of all heads are made from latents for one tile and a few heads at a time.

What is computed on a tile is left to :class:`TileFunctions`: in torch (:mod:`.torch_dense`) or in
kernels (:mod:`.triton.dense`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.scaling import scaled_together
from megatron_dsa.ops.indexer_loss.gradients import Gradients
from megatron_dsa.ops.indexer_loss.inputs import DenseLossInputs, ExpandedKeys, LatentKeys
from megatron_dsa.ops.indexer_loss.teacher import normalised_lse
from megatron_dsa.ops.indexer_loss.tiles import QueryBlock, Tile, query_blocks
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.blocks import Seen
from megatron_dsa.ops.layout.layout import Layout


class TileFunctions(Protocol):
    """What an implementation computes on a tile of ``r`` rows and ``w`` slots.

    ``x`` holds the index queries and weights of the rows and the index keys of the slots, ``seen``
    says in columns of the tile what each token sees. Scores, log-sum-exps and gradients are fp32
    (fp64 for fp64 inputs). What teachers and score gradients are kept in is theirs to choose; a
    sum over ranks adds the teachers up as they are.
    """

    #: Query tokens and slots that a tile may have.
    shape: tuple[int, int]

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        """Return the index keys ``[w, DI]`` of some slots."""

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        """Return the log-sum-exp ``[r]`` of the index scores, ``-inf`` where nothing is seen."""

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        """Return that of the scaled attention scores of every head, ``[H, r]``."""

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return ``sum_h exp(scale * q_h . k_h - lse_h)``, 0 where it is not seen.

        ``lse [H, r]`` may be anything in rows that see nothing.
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
        """Return the gradient of the keys ``[w, DI]``; add those of the rows.

        ``dq [r, HI, DI]`` is left without its factor, the head weights, which is the same for all
        keys. ``dweights [r, HI]`` may be left to :meth:`finish`.
        """

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the gradient of the queries of a block into ``out``, which ``dq`` lacks a factor
        of, and that of their weights if :meth:`backward` has not.

        ``x`` has all keys; ``seen`` counts slots. ``dq`` may be overwritten.
        """


def dense_loss(
    inputs: DenseLossInputs, functions: Callable[[DenseLossInputs], TileFunctions]
) -> torch.Tensor:
    """Return the KL sum over all visible keys (scalar), differentiable in the indexer's inputs.

    Its gradients are complete when its value is: they are formed in the forward pass.
    """
    x = inputs.indexer
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x.q, x.k, x.weights))):
        return _kl_sum(inputs, functions(inputs), None)
    return _DenseLoss.apply(x.q, x.k, x.weights, inputs, functions)


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, inputs, functions):
        grads = Gradients(inputs.indexer)
        loss = _kl_sum(inputs, functions(inputs), grads)
        ctx.save_for_backward(
            grads.q.to(q.dtype), grads.k.to(k.dtype), grads.weights.to(weights.dtype)
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        gradients = ctx.saved_tensors
        return *scaled_together(gradients, dloss, [g.dtype for g in gradients]), None, None


def _kl_sum(
    inputs: DenseLossInputs, functions: TileFunctions, grads: Gradients | None
) -> torch.Tensor:
    # Functions see plain tensors: on their own they would be taken for part of an autograd graph.
    inputs = dataclasses.replace(inputs, indexer=inputs.indexer.detach())
    q = inputs.indexer.q
    loss = q.new_zeros((), dtype=accumulation_dtype(q.dtype))
    rows, width = functions.shape
    for block in query_blocks(inputs.layout, rows):
        tiles = list(block.tiles(width))
        if tiles:
            _Block(inputs, functions, block, tiles).add(loss, grads)
    return loss


@dataclasses.dataclass(frozen=True)
class _Block:
    """Some query tokens of a window, with the tiles of what they see."""

    given: DenseLossInputs
    functions: TileFunctions
    block: QueryBlock
    tiles: list[Tile]

    def add(self, loss: torch.Tensor, grads: Gradients | None) -> None:
        """Add the KL sum of these tokens to ``loss``, and their gradients to ``grads``."""
        arguments, functions, rows = self.given, self.functions, self.block.rows
        x, layout = arguments.indexer, arguments.layout
        # In slots: of a tile they are counted from its first.
        seen = Seen(layout.start[rows], layout.end[rows])
        student_lse, lse = self._log_sum_exps(seen)
        other = None if arguments.other_lse is None else arguments.other_lse[rows].t().to(lse.dtype)
        lse, has_mass = normalised_lse(lse, other, arguments.head_group)
        # A row without a teacher has neither loss nor gradient, as if it saw nothing.
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
        """Return the log-sum-exps over visible keys: the student's ``[r]``, the teacher's
        ``[H, r]``.

        The teacher's are the given ones, if there are.
        """
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
        """Yield every tile with what is seen of it and its teacher, normalised.

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
    """Return what the rows of a tile see, in columns of the tile."""
    low, width = tile.slots.start, tile.slots.stop - tile.slots.start
    start, end = (x[tile.inside] - low for x in (seen.start, seen.end))
    return Seen(start.clamp_(0, width), end.clamp_(0, width))


def take(keys, layout: Layout, slots: slice) -> Any:
    """Return the keys of some slots: a view, or a copy of no more than these tokens."""
    if isinstance(keys, LatentKeys):
        return dataclasses.replace(keys, latents=take(keys.latents, layout, slots))
    if isinstance(keys, ExpandedKeys):
        if layout.key_rows is not None:
            keys = dataclasses.replace(keys, kv=keys.own, v_dim=0)  # a copy leaves values out
        kv, k_pe = (take(x, layout, slots) for x in (keys.kv, keys.k_pe))
        return dataclasses.replace(keys, kv=kv, k_pe=k_pe)
    if layout.key_rows is None:
        return keys[slots]
    return keys.index_select(0, layout.key_rows[slots])


def _join(lse: torch.Tensor, part: torch.Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part))
