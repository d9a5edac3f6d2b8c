"""The dense indexer loss in torch: two streaming passes over tiles of (query rows x keys).

The first pass forms the log-sum-exp of the student's scores, and of the teacher's where nobody has
it. The second forms teacher, student, loss and gradients tile by tile. Memory is linear in the
number of tokens; keys of all heads are made from latents for one tile and a few heads at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from megatron_dsa.layout import Layout
from megatron_dsa.ops.arithmetic import accumulation_dtype, mm, scaled
from megatron_dsa.ops.indexer_loss import DenseLossProblem, LatentKeys
from megatron_dsa.ops.indexer_loss.gradients import Gradients
from megatron_dsa.ops.indexer_loss.teacher import (
    log_sum_exp,
    normalised_lse,
    teacher_lse,
    teacher_tile,
)
from megatron_dsa.ops.indexer_loss.tiles import (
    HEADS_AT_ONCE,
    QueryBlock,
    Tile,
    query_blocks,
    tile_shape,
)
from megatron_dsa.ops.indexer_topk import IndexerInputs
from megatron_dsa.ops.indexer_topk.scores import block_scores, head_blocks, head_products


def dense(problem: DenseLossProblem) -> torch.Tensor:
    """Return the KL sum over all visible keys (scalar), differentiable in the indexer's inputs.

    Its gradients are complete when its value is: they are formed in the forward pass.
    """
    x = problem.inputs
    if x.q.dtype == torch.float16:
        # Gradients exist before the loss scale is applied; in fp16 they would underflow.
        x = IndexerInputs(x.q.float(), x.k.float(), x.weights.float(), x.relu)
        problem = dataclasses.replace(problem, inputs=x)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x.q, x.k, x.weights))):
        return _kl_sum(problem, None)
    return _DenseLoss.apply(x.q, x.k, x.weights, problem)


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, problem):
        grads = Gradients(problem.inputs)
        loss = _kl_sum(problem, grads)
        ctx.save_for_backward(
            grads.q.to(q.dtype), grads.k.to(k.dtype), grads.weights.to(weights.dtype)
        )
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return *(scaled(grad, dloss) for grad in ctx.saved_tensors), None


def _kl_sum(problem: DenseLossProblem, grads: Gradients | None) -> torch.Tensor:
    q = problem.inputs.q
    loss = q.new_zeros((), dtype=accumulation_dtype(q.dtype))
    rows, width = tile_shape(problem)
    for block in query_blocks(problem.layout, rows):
        tiles = list(block.tiles(width))
        if tiles:
            _block(problem, block, tiles, loss, grads)
    return loss


def _block(
    problem: DenseLossProblem,
    block: QueryBlock,
    tiles: list[Tile],
    loss: torch.Tensor,
    grads: Gradients | None,
) -> None:
    """Add the KL sum of some query rows to ``loss``, and their gradients to ``grads``."""
    x, layout = problem.inputs, problem.layout
    seen = _Seen(layout.start[block.rows], layout.end[block.rows])
    student_lse, lse = _log_sum_exps(problem, block, tiles, seen)
    other = None if problem.other_lse is None else problem.other_lse[block.rows].t().to(lse.dtype)
    lse, has_mass = normalised_lse(lse, other, problem.head_group)
    # A row without a teacher has neither loss nor gradient, as if it saw nothing.
    seen = _Seen(seen.start, torch.where(has_mass, seen.end, seen.start))
    dq = None
    if grads is not None:
        dq = x.q.new_zeros(student_lse.shape + x.q.shape[1:], dtype=student_lse.dtype)
    for tile, hidden, teacher in _teachers(problem, tiles, seen, lse):
        keys = _take(x.k, layout, tile.slots)
        log_student = block_scores(x, tile.rows, keys, HEADS_AT_ONCE)
        log_student.sub_(student_lse[tile.inside, None]).masked_fill_(hidden, 0.0)
        loss += torch.xlogy(teacher, teacher).addcmul_(teacher, log_student, value=-1).sum()
        if grads is not None:
            dscores = log_student.exp_().masked_fill_(hidden, 0.0).sub_(teacher)
            _backward(problem, tile, keys, dscores, dq[tile.inside], grads)
    if grads is not None:
        grads.q[block.rows] = dq.mul_(x.weights[block.rows, :, None])


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The slots ``[start, end)`` that each row of a query block sees."""

    start: torch.Tensor
    end: torch.Tensor

    def hidden(self, tile: Tile) -> torch.Tensor:
        """Return bool ``[r, w]``: pairs of a tile that do not see each other."""
        slots = torch.arange(tile.slots.start, tile.slots.stop, device=self.start.device)
        hidden = slots < self.start[tile.inside, None]
        return hidden.logical_or_(slots >= self.end[tile.inside, None])


def _take(keys, layout: Layout, slots: slice):
    """Return the keys of some slots: a view, or a copy of no more than these rows."""
    if isinstance(keys, LatentKeys):
        return dataclasses.replace(keys, latents=_take(keys.latents, layout, slots))
    if layout.key_rows is None:
        return keys[slots]
    return keys.index_select(0, layout.key_rows[slots])


def _log_sum_exps(
    problem: DenseLossProblem, block: QueryBlock, tiles: list[Tile], seen: _Seen
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exps over visible keys: the student's ``[r]``, the teacher's ``[H, r]``.

    The teacher's are the given ones, if there are.
    """
    x, layout, q = problem.inputs, problem.layout, problem.q
    rows = seen.start.shape[0]
    acc, teacher_acc = accumulation_dtype(x.q.dtype), accumulation_dtype(q.dtype)
    student = x.q.new_full((rows,), float("-inf"), dtype=acc)
    if problem.lse is None:
        teacher = q.new_full((q.shape[1], rows), float("-inf"), dtype=teacher_acc)
    else:
        teacher = problem.lse[block.rows].t().to(teacher_acc)
    for tile in tiles:
        hidden = seen.hidden(tile)
        keys = _take(x.k, layout, tile.slots)
        scores = block_scores(x, tile.rows, keys, HEADS_AT_ONCE)
        _join(student[tile.inside], log_sum_exp(scores, hidden))
        if problem.lse is None:
            keys = _take(problem.k, layout, tile.slots)
            part = teacher_lse(q[tile.rows], keys, hidden, problem.softmax_scale)
            _join(teacher[:, tile.inside], part)
    return student, teacher


def _join(lse: torch.Tensor, part: torch.Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part))


def _teachers(
    problem: DenseLossProblem, tiles: list[Tile], seen: _Seen, lse: torch.Tensor
) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    """Yield every tile with its mask and its teacher ``[r, w]``, normalised and 0 where hidden.

    The sum over ranks of one tile runs under the computation of the next.
    """
    acc, group, last = accumulation_dtype(problem.inputs.q.dtype), problem.head_group, None
    for tile in tiles:
        hidden = seen.hidden(tile)
        keys = _take(problem.k, problem.layout, tile.slots)
        teacher = teacher_tile(
            problem.q[tile.rows], keys, lse[:, tile.inside], problem.softmax_scale
        )
        del keys
        teacher = teacher.masked_fill_(hidden, 0.0).to(acc)
        if group is None:
            yield tile, hidden, teacher
            continue
        work = torch.distributed.all_reduce(teacher, group=group, async_op=True)
        if last is not None:
            yield _reduced(*last)
        last = tile, hidden, teacher, work
    if last is not None:
        yield _reduced(*last)


def _reduced(tile: Tile, hidden: torch.Tensor, teacher: torch.Tensor, work):
    work.wait()
    return tile, hidden, teacher


def _backward(
    problem: DenseLossProblem,
    tile: Tile,
    keys: torch.Tensor,
    dscores: torch.Tensor,
    dq: torch.Tensor,
    grads: Gradients,
) -> None:
    """Add a tile's gradients, given the gradient ``[r, w]`` on its scores.

    ``dq [r, HI, DI]`` is left without its factor, the head weights, which is the same for all keys.
    """
    x = problem.inputs
    narrow = dscores.to(x.q.dtype)
    for heads in head_blocks(x.q.shape[1], HEADS_AT_ONCE):
        dweights, flat = _through_heads(x, tile.rows, keys, heads, dscores, narrow)
        grads.weights[tile.rows, heads].add_(dweights)
        dq[:, heads].add_(mm(flat, keys).view_as(dq[:, heads]))
        weighted = x.q[tile.rows, heads] * x.weights[tile.rows, heads, None]
        dk = mm(flat.t(), weighted.to(x.q.dtype).flatten(0, 1))
        grads.add_to_slots(problem.layout, tile.slots, dk)
        del flat  # before the products of the next heads exist


def _through_heads(x: IndexerInputs, rows: slice, keys, heads: slice, dscores, narrow):
    """Return the gradient on the weights of some heads ``[r, h]`` and, for products with 16-bit
    operands, that on the products of these heads ``[r * h, w]``, but for the weights.
    """
    products = head_products(x, rows, keys, heads)
    dweights = torch.bmm(products, dscores[..., None]).squeeze(-1)
    dproducts = narrow[:, None].expand_as(products)
    if x.relu:
        # Written once in the narrow type: no mask, product and cast in the wide one.
        dproducts = torch.where(products > 0, dproducts, 0.0)
    return dweights, dproducts.flatten(0, 1)
