"""Sparse attention as one differentiable function.

Forward and backward are dispatched independently; they share only ``out`` and ``lse``. What is
saved is ``q, kv, out, lse, indices``: no scores, no gathered keys, nothing of the indexer's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.dispatch import Policy, run
from megatron_dsa.indexer_training import IndexerTraining, SelectedKeysLoss, scaled
from megatron_dsa.ops.indexer_topk import IndexerInputs
from megatron_dsa.ops.sparse_attention import SparseProblem
from megatron_dsa.support import Problem


@dataclass(frozen=True)
class Settings:
    """What takes no part in autograd; see :func:`megatron_dsa.dsa_kernels.sparse_attention`."""

    v_dim: int
    softmax_scale: float
    policy: Policy
    problem: Problem
    want_p_sum: bool
    indexer: IndexerTraining | None

    def arguments(self, q, kv, sink, indices, topk_length, want_p_sum: bool) -> SparseProblem:
        """Put the tensors of a call together."""
        return SparseProblem(
            q=q,
            kv=kv,
            indices=indices,
            v_dim=self.v_dim,
            softmax_scale=self.softmax_scale,
            topk_length=topk_length,
            sink=sink,
            workspace_bytes=self.policy.workspace_bytes,
            want_p_sum=want_p_sum,
        )

    def run(self, operation: str, *args):
        """Run an operation of this call."""
        return run(operation, self.problem, self.policy, *args)


class SparseAttention(torch.autograd.Function):
    """``q, kv, kv_grad, sink, index q, k, weights, ... -> out, lse, p_sum``."""

    @staticmethod
    def forward(ctx, q, kv, kv_grad, sink, index_q, index_k, index_weights, indices, length, s):
        """Return ``out``, ``lse`` and ``p_sum`` (``None`` unless asked for)."""
        arguments = s.arguments(q, kv, sink, indices, length, s.want_p_sum)
        out, lse, p_sum = s.run("sparse_attention_forward", arguments)
        if s.want_p_sum and p_sum is None:
            p_sum = s.run("sparse_attention_probabilities", arguments, lse)
        ctx.save_for_backward(
            q, kv, sink, index_q, index_k, index_weights, indices, length, out, lse
        )
        ctx.settings = s
        ctx.separate_kv_grad = kv_grad is not None
        ctx.mark_non_differentiable(*(x for x in (lse, p_sum) if x is not None))
        return out, lse, p_sum

    @staticmethod
    def backward(ctx, dout, _dlse, _dp_sum):
        """Return all gradients; the sparse indexer loss exists in here only."""
        s: Settings = ctx.settings
        q, kv, sink, *index_tensors, indices, length, out, lse = ctx.saved_tensors
        trains = s.indexer is not None and any(ctx.needs_input_grad[4:7])
        arguments = s.arguments(q, kv, sink, indices, length, trains)
        dq, dkv, dsink, teacher = s.run(
            "sparse_attention_backward", arguments, out, lse, dout.contiguous()
        )
        index_grads = (None,) * 3
        if trains:
            if teacher is None:
                teacher = s.run("sparse_attention_probabilities", arguments, lse)
            index_grads = _train(s, index_tensors, indices, length, teacher)
        if dsink is not None:
            dsink = dsink.to(sink.dtype)
        to_kv, to_channel = (None, dkv) if ctx.separate_kv_grad else (dkv.to(kv.dtype), None)
        return dq, to_kv, to_channel, dsink, *index_grads, None, None, None


def _train(s: Settings, index_tensors, indices, length, teacher: torch.Tensor):
    """Return the gradients of the indexer's tensors and record the loss."""
    training = s.indexer
    if training.head_group is not None:
        torch.distributed.all_reduce(teacher, group=training.head_group)
    inputs = IndexerInputs(*index_tensors, training.inputs.relu)
    loss = SelectedKeysLoss(training.layout, indices, length, teacher, s.policy)
    value, gradients = loss.with_gradients(inputs)
    training.record(value)
    weight = training.weight()
    return tuple(
        scaled(gradient, weight).to(x.dtype)
        for gradient, x in zip(gradients, index_tensors, strict=True)
    )
