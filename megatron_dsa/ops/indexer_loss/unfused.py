"""The indexer losses in torch: a block of queries at a time, no ``S^2`` buffer, exact gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from megatron_dsa.ops.arithmetic import (
    accumulation_dtype,
    bmm,
    mm,
    rows_in_budget,
    valid_entries,
)
from megatron_dsa.ops.indexer_loss import (
    DenseLossProblem,
    IndexerGradients,
    SparseLoss,
    SparseLossProblem,
)
from megatron_dsa.ops.indexer_topk import IndexerInputs
from megatron_dsa.ops.indexer_topk.scores import block_scores, head_blocks, head_products

#: Heads handled at a time; smaller blocks need less memory, larger ones are faster.
HEADS_AT_ONCE = 8


def sparse(problem: SparseLossProblem) -> SparseLoss:
    """Return the KL sum over the selected keys, with the gradients if they will be asked for."""
    x = problem.inputs
    acc = accumulation_dtype(x.q.dtype)
    value = x.q.new_zeros((), dtype=acc)
    grads = _Gradients(x) if problem.want_gradients else None
    student = None if grads else x.q.new_empty(problem.indices.shape, dtype=acc)
    for chunk in _sparse_chunks(problem):
        # A view: the normalised teacher is left in place of the given one.
        part, chunk_student = _kl_rows(chunk.logits(), problem.teacher[chunk.rows], chunk.mask)
        value += part
        if grads is None:
            student[chunk.rows] = chunk_student
        else:
            chunk.backward(chunk_student.sub_(problem.teacher[chunk.rows]), grads)
    return SparseLoss(value, student, None if grads is None else grads.result())


def sparse_backward(problem: SparseLossProblem, student: torch.Tensor) -> IndexerGradients:
    """Return the gradients of the KL sum from the student and the normalised teacher."""
    grads = _Gradients(problem.inputs)
    for chunk in _sparse_chunks(problem):
        chunk.backward(student[chunk.rows] - problem.teacher[chunk.rows], grads)
    return grads.result()


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
        return _dense_pass(problem, None)
    return _DenseLoss.apply(x.q, x.k, x.weights, problem)


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, problem):
        grads = _Gradients(problem.inputs)
        loss = _dense_pass(problem, grads)
        ctx.save_for_backward(
            grads.q.to(q.dtype), grads.k.to(k.dtype), grads.weights.to(weights.dtype)
        )
        return loss

    @staticmethod
    def backward(ctx, dloss):
        acc = accumulation_dtype(dloss.dtype)
        scaled = ((grad.to(acc) * dloss).to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None


class _Gradients:
    """fp32 accumulators for dq, dk and dweights."""

    def __init__(self, inputs: IndexerInputs):
        acc = accumulation_dtype(inputs.q.dtype)
        # Each query row is written once, by its own block, so dq needs no wider accumulator.
        self.q = torch.zeros_like(inputs.q)
        # One spare row takes the contributions of invalid indices.
        self._k = inputs.k.new_zeros(inputs.k.shape[0] + 1, inputs.k.shape[1], dtype=acc)
        self.weights = torch.zeros_like(inputs.weights, dtype=acc)

    @property
    def k(self) -> torch.Tensor:
        return self._k[:-1]

    @property
    def k_with_spare(self) -> torch.Tensor:
        return self._k

    def result(self) -> IndexerGradients:
        return IndexerGradients(self.q, self.k, self.weights)


def _kl_rows(logits: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor):
    """Return the KL sum of a block and the student (its softmax), of rows that have a teacher.

    ``teacher`` is normalised in place. Rows whose teacher has no mass (no visible key, padding)
    contribute exactly 0 to the sum and have a student of 0.
    """
    teacher.masked_fill_(~mask, 0.0)
    mass = teacher.sum(-1, keepdim=True)
    has_mass = mass > 0
    teacher.div_(torch.where(has_mass, mass, 1.0))
    logits = logits.masked_fill_(~mask, float("-inf"))
    # A row without any valid entry would be all -inf: give it a finite softmax, then drop it.
    logits = logits.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
    log_student = torch.log_softmax(logits, dim=-1)
    entropy = torch.xlogy(teacher, teacher).sum()
    # 0 * -inf at masked entries must be 0.
    cross = (teacher * log_student.masked_fill(~mask, 0.0)).sum()
    student = log_student.exp_().masked_fill_(~(mask & has_mass), 0.0)
    return entropy - cross, student


@dataclasses.dataclass
class _SparseChunk:
    """Some query rows with their gathered keys and head products."""

    inputs: IndexerInputs
    rows: slice
    index: torch.Tensor  # [r, K] int64, invalid entries -> the spare row
    mask: torch.Tensor  # [r, K]
    keys: torch.Tensor  # [r, K, DI]
    products: torch.Tensor  # [r, HI, K], after the relu if there is one

    def weights(self) -> torch.Tensor:
        return self.inputs.weights[self.rows].to(self.products.dtype)

    def logits(self) -> torch.Tensor:
        """Index scores ``[r, K]``."""
        return torch.bmm(self.weights()[:, None], self.products).squeeze(1)

    def backward(self, dlogits: torch.Tensor, grads: _Gradients) -> None:
        """Add this chunk's gradients, given the gradient on its scores."""
        x = self.inputs
        grads.weights[self.rows] = torch.bmm(self.products, dlogits[..., None]).squeeze(-1)
        dproducts = _through_relu(self.products, dlogits, self.weights(), x.relu).to(x.q.dtype)
        grads.q[self.rows] = bmm(dproducts, self.keys).to(x.q.dtype)
        dkeys = bmm(dproducts.transpose(1, 2), x.q[self.rows])
        grads.k_with_spare.index_add_(0, self.index.flatten(), dkeys.flatten(0, 1))


def _sparse_chunks(problem: SparseLossProblem) -> Iterator[_SparseChunk]:
    """Cut the query rows so that the temporaries of a chunk fit the budget."""
    x, width = problem.inputs, problem.indices.shape[1]
    heads, dim = x.q.shape[1], x.q.shape[2]
    num_keys = x.k.shape[0]
    table = torch.cat([x.k, x.k.new_zeros(1, dim)])
    acc = accumulation_dtype(x.q.dtype)
    per_row = width * ((3 * dim + 3 * heads + 6) * acc.itemsize + 24)
    rows_at_once = rows_in_budget(problem.workspace_bytes, per_row)
    for first in range(0, x.q.shape[0], rows_at_once):
        rows = slice(first, first + rows_at_once)
        index = problem.indices[rows]
        length = None if problem.topk_length is None else problem.topk_length[rows]
        mask = valid_entries(index, length, num_keys)
        index = torch.where(mask, index, num_keys).long()
        keys = table[index]
        products = bmm(x.q[rows], keys.transpose(1, 2))
        yield _SparseChunk(x, rows, index, mask, keys, products.relu_() if x.relu else products)


def _through_relu(products, dlogits, weights, relu: bool) -> torch.Tensor:
    """Gradient on the head products ``[r, h, w]``: ``w_h * dI``, cut where the relu was 0."""
    grad = dlogits[:, None] * weights[..., None]
    return grad.masked_fill_(products <= 0, 0.0) if relu else grad


def _dense_pass(problem: DenseLossProblem, grads: _Gradients | None) -> torch.Tensor:
    x, layout = problem.inputs, problem.layout
    acc = accumulation_dtype(x.q.dtype)
    heads_at_once = min(HEADS_AT_ONCE, x.q.shape[1])
    index_keys = layout.keys_in_slot_order(x.k)
    teacher_keys = layout.keys_in_slot_order(problem.k)
    loss = x.q.new_zeros((), dtype=acc)
    live = 3 * max(heads_at_once, min(HEADS_AT_ONCE, problem.q.shape[1])) + 6

    def rows_for_width(width: int) -> int:
        return rows_in_budget(problem.workspace_bytes, width * (live * acc.itemsize + 8))

    for block in layout.blocks(rows_for_width):
        slots = slice(block.lo, block.hi)
        mask = layout.visible(block)
        teacher = _teacher(problem, block.rows, teacher_keys[slots], mask)
        if problem.head_group is not None:
            torch.distributed.all_reduce(teacher, group=problem.head_group)
        keys = index_keys[slots]
        logits = block_scores(x, block.rows, keys, heads_at_once)
        value, student = _kl_rows(logits, teacher, mask)
        loss += value
        if grads is None:
            continue
        dlogits = student.sub_(teacher)
        for heads in head_blocks(x.q.shape[1], heads_at_once):
            weights = x.weights[block.rows, heads].to(acc)
            products = head_products(x, block.rows, keys, heads)
            grads.weights[block.rows, heads] = torch.bmm(products, dlogits[..., None]).squeeze(-1)
            dproducts = _through_relu(products, dlogits, weights, x.relu).to(x.q.dtype)
            flat = dproducts.flatten(0, 1)  # [r * h, w]
            q = x.q[block.rows, heads]
            grads.q[block.rows, heads] = mm(flat, keys).unflatten(0, q.shape[:2]).to(x.q.dtype)
            grads.k[slots] += mm(flat.t(), q.flatten(0, 1))
    if grads is not None and layout.key_rows is not None:
        in_slot_order = grads.k.clone()
        grads.k.index_copy_(0, layout.key_rows, in_slot_order)
    return loss


def _teacher(problem: DenseLossProblem, rows: slice, keys: torch.Tensor, mask: torch.Tensor):
    """Sum over local heads of ``softmax(scale * q . k)`` on a block, ``[r, w]``.

    The softmax has other keys in its denominator, too, if the problem says so.
    """
    q = problem.q
    empty = ~mask.any(-1)[:, None]
    total = None
    for heads in head_blocks(q.shape[1], HEADS_AT_ONCE):
        block_q = q[rows, heads].transpose(0, 1)  # [h, r, D]
        if keys.shape[1] == 1:
            # Heads are folded into rows: expanded keys might be copied once per head.
            scores = mm(block_q.flatten(0, 1), keys[:, 0].t()).unflatten(0, block_q.shape[:2])
        else:
            scores = bmm(block_q, keys[:, heads].permute(1, 2, 0))
        scores.mul_(problem.softmax_scale)
        scores.masked_fill_(~mask, float("-inf")).masked_fill_(empty, 0.0)
        if problem.other_lse is None:
            part = torch.softmax(scores, dim=-1).sum(0)
        else:
            other = problem.other_lse[rows, heads].t().to(scores.dtype)
            mass = torch.logaddexp(torch.logsumexp(scores, dim=-1), other)
            part = scores.sub_(mass[..., None]).exp_().sum(0)
        total = part if total is None else total.add_(part)
    return total.masked_fill_(empty, 0.0)
