"""Relative errors of measured results against float64, on a sample that is quick to compute.

* forward: out and lse of sampled query rows.
* backward: dq of sampled query rows, dkv of sampled key rows (summed over all queries that select
  them), dsink. The sums use the out and lse that the backward was given.
* teacher: sampled query rows.
Every function returns the largest ``norm(x - ref) / norm(ref)`` of its outputs.
"""

from __future__ import annotations

from functools import cached_property

import torch

from benchmarks.verify import largest_error
from megatron_dsa.ops.sparse_attention.reference import sparse_attention

SAMPLED_ROWS = 8
#: Query rows that are handled at a time in sums over all queries.
_ROWS_AT_ONCE = 64


class Verifier:
    """Float64 references for the inputs of one case, each computed when it is first asked for."""

    def __init__(self, inputs, seed: int = 1):
        self.inputs = inputs
        generator = torch.Generator().manual_seed(seed)
        queries, topk = inputs.indices.shape
        rows = torch.randperm(queries, generator=generator)[:SAMPLED_ROWS]
        rows[0], rows[-1] = 0, queries - 1  # the borders are where tiles end
        self.rows = rows.to(inputs.q.device)
        column = torch.randint(topk, (len(rows),), generator=generator).to(inputs.q.device)
        #: Key rows that at least one query selects.
        self.keys = inputs.indices[self.rows, column].long().unique()

    def error(self, operation: str, result) -> float:
        """Return the relative error of what ``operation`` returned."""
        return getattr(self, operation)(result)

    def forward(self, result) -> float:
        out, lse = result[:2]
        expected = self._attention
        return largest_error(
            (out[self.rows], expected["out"]), (lse[self.rows], expected["lse"])
        )  # fmt: skip

    def teacher(self, result) -> float:
        return largest_error((result[self.rows], self._attention["p_sum"]))

    def backward(self, result) -> float:
        dq, dkv, dsink = result[:3]
        expected_dkv, expected_dsink = self._key_gradients
        pairs = [(dq[self.rows], self._attention["dq"]), (dkv[self.keys], expected_dkv)]
        if dsink is not None:
            pairs.append((dsink, expected_dsink))
        return largest_error(*pairs)

    @cached_property
    def _attention(self) -> dict[str, torch.Tensor]:
        """out, lse, p_sum and dq of the sampled rows."""
        x = self.inputs
        index = x.indices[self.rows].long()
        keys = x.kv[index.flatten()].double()
        q = x.q[self.rows].double().requires_grad_()
        sink = None if x.sink is None else x.sink.double()
        own = torch.arange(index.numel(), device=q.device, dtype=torch.int32).view_as(index)
        out, lse = sparse_attention(
            q, keys, own, v_dim=x.v_dim, softmax_scale=x.softmax_scale, sink=sink
        )
        (dq,) = torch.autograd.grad(out, q, x.dout[self.rows].double())
        with torch.no_grad():
            logits = torch.einsum("qhd,qkd->qhk", q, keys.view(*index.shape, -1))
            p = torch.exp(logits * x.softmax_scale - _denominator(lse, sink)[..., None])
        return {"out": out.detach(), "lse": lse.detach(), "p_sum": p.sum(1), "dq": dq}

    @cached_property
    def _key_gradients(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dkv of the sampled keys and dsink, summed over all queries.

        ``dkv_j = sum scale * dS_tj q_t + P_tj dO_t`` with ``P = exp(logit - lse)`` and
        ``dS = P * (dO . v_j - dO . O)``, over the queries and heads that select ``j``.
        """
        x, scale = self.inputs, self.inputs.softmax_scale
        keys = x.kv[self.keys].double()
        values = keys[:, : x.v_dim]
        sink = None if x.sink is None else x.sink.double()
        dkv = torch.zeros_like(keys)
        dsink = None if sink is None else torch.zeros_like(sink)
        for first in range(0, x.q.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            selected = (x.indices[rows, :, None] == self.keys).any(1)  # [r, keys]
            q, dout = x.q[rows].double(), x.dout[rows].double()
            total = _denominator(x.lse[rows].double(), sink)
            delta = (dout * x.out[rows].double()).sum(-1)
            p = torch.exp(torch.einsum("qhd,kd->qhk", q, keys) * scale - total[..., None])
            p = p * selected[:, None]
            ds = p * (torch.einsum("qhd,kd->qhk", dout, values) - delta[..., None]) * scale
            dkv += torch.einsum("qhk,qhd->kd", ds, q)
            dkv[:, : x.v_dim] += torch.einsum("qhk,qhd->kd", p, dout)
            if sink is not None:
                dsink -= (torch.exp(sink - total) * delta).sum(0)
        return dkv, dsink


def _denominator(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Log of the softmax denominator ``[Sq, H]``, sink included."""
    return lse if sink is None else torch.logaddexp(lse, sink.expand_as(lse))
