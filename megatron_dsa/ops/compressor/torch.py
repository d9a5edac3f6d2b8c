"""Compressor pooling in torch: any device, any dims, temporary memory bounded by a budget.

Groups are handled a few at a time; the backward pass gathers the rows of a chunk and computes their
softmax again.
"""

from __future__ import annotations

import torch

from megatron_dsa.numerics.arithmetic import accumulation_dtype, rows_in_budget
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.ops.compressor.inputs import CompressorProblem
from megatron_dsa.sequence.compressed import Groups


def compress(problem: CompressorProblem) -> torch.Tensor:
    """Return ``pooled [G, d]`` in the dtype of the values.

    Differentiable in values, scores and ape.
    """
    return _Compress.apply(problem.values, problem.scores, problem.ape, problem)


def _chunks(problem: CompressorProblem):
    """Yield slices of slots whose temporaries fit the budget."""
    positions = problem.ratio * (2 if problem.overlap else 1)
    acc = accumulation_dtype(problem.values.dtype).itemsize
    # Gathered values and scores, probabilities, both gradients, and torch's own intermediates.
    slots = rows_in_budget(problem.workspace_bytes, positions * (problem.dim * 8 * acc + 32))
    for first in range(0, problem.groups.first_row.shape[0], slots):
        yield slice(first, first + slots)


def _parts(problem: CompressorProblem, slots: slice):
    """Yield ``(channels, rows [g, ratio] int64, used [g, ratio])`` of own and previous rows.

    Rows that are not used are row 0, which exists but whose content must not matter.
    """
    groups, width = problem.groups, problem.values.shape[1]
    first = groups.first_row[slots].long()[:, None]
    place = torch.arange(problem.ratio, device=first.device)
    used = (first >= 0).expand(-1, problem.ratio)
    rows = first + place * groups.row_step
    yield slice(width - problem.dim, width), torch.where(used, rows, 0), used
    if problem.overlap:
        used = used & (groups.position[slots] > 0)[:, None]
        rows = rows - problem.ratio * groups.row_step
        yield slice(0, problem.dim), torch.where(used, rows, 0), used


def _softmax(problem: CompressorProblem, slots: slice):
    """Return the values and probabilities ``[g, positions, d]`` and the parts of a chunk."""
    dtype = accumulation_dtype(problem.values.dtype)
    parts = list(_parts(problem, slots))
    values, scores = [], []
    for channels, rows, used in parts:
        unused = ~used[..., None]
        value = problem.values[:, channels][rows].to(dtype)
        score = problem.scores[:, channels][rows].to(dtype) + problem.ape[:, channels]
        values.append(value.masked_fill_(unused, 0.0))
        scores.append(score.masked_fill_(unused, float("-inf")))
    scores = torch.cat(scores, 1)
    top = scores.amax(1, keepdim=True)
    # No finite score, no softmax: the probabilities are 0, not 0/0.
    probs = scores.sub_(torch.where(top == float("-inf"), 0.0, top)).exp_()
    total = probs.sum(1, keepdim=True)
    return torch.cat(values, 1), probs.div_(torch.where(total == 0, 1.0, total)), parts


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scores, ape, problem):
        groups = problem.groups
        ctx.save_for_backward(values, scores, ape, groups.first_row, groups.position)
        # The rest of the problem; its tensors are put back from the saved ones.
        ctx.rest = (groups.row_step, problem.ratio, problem.overlap, problem.workspace_bytes)
        pooled = values.new_zeros(groups.first_row.shape[0], problem.dim)
        if values.shape[0] == 0:
            return pooled
        for slots in _chunks(problem):
            rows, probs, _ = _softmax(problem, slots)
            pooled[slots] = rows.mul_(probs).sum(1).to(values.dtype)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx, dpooled):
        """Return the gradients of values, scores and ape; probabilities are formed again."""
        values, scores, ape, first_row, position = ctx.saved_tensors
        row_step, *rest = ctx.rest
        groups = Groups(first_row, position, row_step)
        problem = CompressorProblem(values, scores, ape, groups, *rest)
        dvalues = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
        dscores, dape = torch.zeros_like(dvalues), torch.zeros_like(ape)
        if values.shape[0] == 0:
            return dvalues, dscores, dape, None
        dtype = accumulation_dtype(values.dtype)
        for slots in _chunks(problem):
            rows, probs, parts = _softmax(problem, slots)
            dvalue = probs * dpooled[slots].to(dtype)[:, None]
            dscore = rows.sub_((rows * probs).sum(1, keepdim=True)).mul_(dvalue)
            begin = 0
            for channels, index, used in parts:
                own, begin = slice(begin, begin + problem.ratio), begin + problem.ratio
                # A row is in one group per part, so these sums have one term; unused entries add
                # 0 to row 0, whatever the gradient of a slot without a group is.
                index, unused = index.flatten(), ~used[..., None]
                for total, part in ((dvalues, dvalue), (dscores, dscore)):
                    part = part[:, own].masked_fill_(unused, 0.0)
                    total[:, channels].index_add_(0, index, part.to(total.dtype).flatten(0, 1))
                dape[:, channels] += dscore[:, own].sum(0)
        return dvalues, dscores, dape, None
