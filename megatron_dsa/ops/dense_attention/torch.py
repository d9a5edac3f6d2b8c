"""Dense attention in torch, a block of queries at a time; blocks above the diagonal are skipped."""

from __future__ import annotations

import torch

from megatron_dsa.numerics.arithmetic import accumulation_dtype, bmm, rows_in_budget
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.ops.dense_attention.inputs import DenseProblem


def forward(problem: DenseProblem) -> torch.Tensor:
    """Return ``out [Sq, H, Dv]``, differentiable with respect to q, k and v."""
    return _DenseAttention.apply(problem.q, problem.k, problem.v, problem)


def _blocks(problem: DenseProblem, copies: int):
    heads = problem.q.shape[1]
    acc = accumulation_dtype(problem.q.dtype).itemsize

    def rows_for_width(width: int) -> int:
        return rows_in_budget(problem.workspace_bytes, copies * heads * width * acc)

    return problem.layout.blocks(rows_for_width)


def _scores(problem: DenseProblem, block, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled logits ``[H, r, w]``, ``-inf`` at what a query does not see."""
    scores = bmm(q, k.transpose(1, 2)).mul_(problem.softmax_scale)
    return scores.masked_fill_(~problem.layout.visible(block), float("-inf"))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, problem):
        """Return ``out [Sq, H, Dv]``; saves it with the lse for the backward."""
        acc = accumulation_dtype(q.dtype)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_empty(q.shape[0], q.shape[1], dtype=acc)
        keys = problem.layout.keys_in_slot_order(k)
        values = problem.layout.keys_in_slot_order(v)
        for block in _blocks(problem, copies=3):
            scores = _scores(
                problem, block, _heads_first(q[block.rows]), _heads_first(keys[block.lo : block.hi])
            )
            block_lse = torch.logsumexp(scores, dim=-1)
            safe = torch.where(block_lse == float("-inf"), 0.0, block_lse)
            probs = scores.sub_(safe[..., None]).exp_().to(q.dtype)
            out[block.rows] = _heads_first(
                bmm(probs, _heads_first(values[block.lo : block.hi])).to(q.dtype)
            )
            lse[block.rows] = safe.transpose(0, 1)
        ctx.save_for_backward(q, k, v, out, lse)
        # Tensors travel through save_for_backward alone, so that recompute and offloading see them.
        ctx.settings = (problem.layout, problem.softmax_scale, problem.workspace_bytes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        """Return the gradients of q, k and v; probabilities are recomputed from the lse."""
        q, k, v, out, lse = ctx.saved_tensors
        problem, acc = DenseProblem(q, k, v, *ctx.settings), accumulation_dtype(q.dtype)
        layout = problem.layout
        keys, values = layout.keys_in_slot_order(k), layout.keys_in_slot_order(v)
        dq = torch.empty_like(q)
        dk = k.new_zeros(keys.shape, dtype=acc)
        dv = v.new_zeros(values.shape, dtype=acc)
        for block in _blocks(problem, copies=5):
            slots = slice(block.lo, block.hi)
            block_q, block_k = _heads_first(q[block.rows]), _heads_first(keys[slots])
            block_dout = _heads_first(dout[block.rows].to(q.dtype))
            delta = (block_dout.to(acc) * _heads_first(out[block.rows]).to(acc)).sum(-1)
            probs = _scores(problem, block, block_q, block_k)
            probs = probs.sub_(lse[block.rows].transpose(0, 1)[..., None]).exp_()
            dscores = bmm(block_dout, _heads_first(values[slots]).transpose(1, 2))
            dscores = dscores.sub_(delta[..., None]).mul_(probs).mul_(problem.softmax_scale)
            dscores = dscores.to(q.dtype)
            dq[block.rows] = _heads_first(bmm(dscores, block_k).to(q.dtype))
            dk[slots] += _heads_first(bmm(dscores.transpose(1, 2), block_q))
            dv[slots] += _heads_first(bmm(probs.to(q.dtype).transpose(1, 2), block_dout))
        if layout.key_rows is not None:
            dk = torch.empty_like(dk).index_copy_(0, layout.key_rows, dk)
            dv = torch.empty_like(dv).index_copy_(0, layout.key_rows, dv)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None
