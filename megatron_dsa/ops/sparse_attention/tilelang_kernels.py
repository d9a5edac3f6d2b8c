"""Sparse attention backward through this package's own kernel (Hopper, bf16).

Any width, ragged lengths, a sink, and any number of heads up to 128 need no padding and no other
kernel; one kernel is compiled per head count and dim, when it is first called.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.arithmetic import lengths
from megatron_dsa.ops.sparse_attention import SparseProblem
from megatron_dsa.ops.sparse_attention.fragments import in_column_order


def backward(problem: SparseProblem, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor):
    """Return ``dq`` (dtype of q), ``dkv`` fp32, ``dsink`` fp32 or ``None``, and ``None``."""
    from megatron_dsa.ops.sparse_attention.hopper.backward import compiled

    q, kv = problem.q.contiguous(), problem.kv.contiguous()
    queries, heads, dim = q.shape
    total, sink = lse, problem.sink
    if sink is not None:
        sink = sink.float()
        total = torch.logaddexp(lse, sink.expand_as(lse))
    dq = torch.empty_like(q)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    delta = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    compiled(heads, dim, problem.v_dim)(
        q.view(-1, dim),
        kv,
        out.contiguous().view(-1, problem.v_dim),
        dout.to(q.dtype).contiguous().view(-1, problem.v_dim),
        total.contiguous().view(-1),
        problem.indices.contiguous(),
        lengths(problem.indices, problem.topk_length),
        dq.view(-1, dim),
        dkv,
        delta.view(-1),
        problem.softmax_scale,
    )
    dsink = None
    if sink is not None:
        # A head without any key and a sink of -inf has no probability to lose: 0, not NaN.
        share = torch.exp(sink - torch.where(total == float("-inf"), float("inf"), total))
        dsink = -(share * delta).sum(0)
    return dq, in_column_order(dkv), dsink, None
