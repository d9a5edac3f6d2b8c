"""Inputs, float64 results and comparison of sparse attention."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs, reference
from megatron_dsa.testing.cases import Lists, Shape, chunks, normal
from megatron_dsa.testing.comparison import Comparison


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of forward and backward; for shapes see ``SparseAttentionInputs``."""

    q: torch.Tensor
    kv: torch.Tensor
    lists: Lists
    sink: torch.Tensor | None
    dout: torch.Tensor
    v_dim: int
    softmax_scale: float
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    def inputs(self, want_p_sum: bool = False) -> SparseAttentionInputs:
        return SparseAttentionInputs(
            q=self.q, kv=self.kv, indices=self.lists.indices, v_dim=self.v_dim,
            softmax_scale=self.softmax_scale, topk_length=self.lists.length, sink=self.sink,
            workspace_bytes=self.workspace_bytes, want_p_sum=want_p_sum,
        )  # fmt: skip

    def take(self, tokens: torch.Tensor | slice) -> AttentionCase:
        return dataclasses.replace(
            self, q=self.q[tokens], lists=self.lists.take(tokens), dout=self.dout[tokens]
        )


def attention_case(
    shape: Shape, lists: Lists, softmax_scale: float | None = None, seed: int = 2
) -> AttentionCase:
    """Draw a case whose unselected keys are NaN; by default logits have standard deviation 1."""
    draw, tokens = normal(lists.indices.device, seed), len(lists.indices)
    q = draw(tokens, shape.heads, shape.qk_dim).to(shape.dtype)
    # Means in values and dout keep gradients from cancelling to rounding error; random signs of
    # dout keep dkv visible.
    kv = draw(shape.seq, shape.qk_dim).add_(0.1).to(shape.dtype)
    kv[lists.unselected] = float("nan")
    dout = draw(tokens, shape.heads, shape.v_dim) + draw(tokens, shape.heads, 1).sign()
    return AttentionCase(
        q=q,
        kv=kv,
        lists=lists,
        sink=draw(shape.heads) + math.log(min(shape.topk, shape.seq)) if shape.sink else None,
        dout=dout.to(shape.dtype),
        v_dim=shape.v_dim,
        softmax_scale=shape.qk_dim**-0.5 if softmax_scale is None else softmax_scale,
    )


@dataclass(frozen=True)
class ExpectedAttention:
    """Float64 results of an :class:`AttentionCase`; ``dsink`` is ``None`` without a sink."""

    out: torch.Tensor
    lse: torch.Tensor
    p_sum: torch.Tensor
    dq: torch.Tensor
    dkv: torch.Tensor
    dsink: torch.Tensor | None


def expected_attention(case: AttentionCase) -> ExpectedAttention:
    kv = case.kv.detach().double().requires_grad_()
    sink = None if case.sink is None else case.sink.detach().double().requires_grad_()
    (tokens, heads, dim), width = case.q.shape, case.lists.indices.shape[1]
    results = []
    for chunk in chunks(tokens, 8 * width * (6 * dim + 8 * heads)):
        part = case.take(chunk)
        q = part.q.detach().double().requires_grad_()
        found = reference(
            q, kv, part.lists.indices, v_dim=case.v_dim, softmax_scale=case.softmax_scale,
            topk_length=part.lists.length, sink=sink,
        )  # fmt: skip
        found[0].backward(part.dout.double())
        assert q.grad is not None
        results.append((*(x.detach() for x in found), q.grad))
    out, lse, p_sum, dq = (torch.cat(parts) for parts in zip(*results, strict=True))
    assert kv.grad is not None
    return ExpectedAttention(out, lse, p_sum, dq, kv.grad, None if sink is None else sink.grad)


class AttentionReference:
    def __init__(self, case: AttentionCase):
        self.case = case
        self.expected = expected_attention(case)

    def lse(self) -> torch.Tensor:
        return self.expected.lse.float()

    def forward(self, found: Comparison, out, lse, p_sum=None) -> None:
        case, expected = self.case, self.expected
        found.compare_forward(out, lse, expected.out, expected.lse, case.lists.empty, case.q.dtype)
        if p_sum is not None:
            self.teacher(found, p_sum)

    def backward(self, found: Comparison, dq, dkv, dsink, p_sum=None) -> None:
        lists, expected = self.case.lists, self.expected
        found.compare("dq", dq, expected.dq)
        found.compare("dkv", dkv, expected.dkv)
        found.require((dq[lists.empty] == 0).all(), "dq of an empty row is not 0")
        found.require((dkv[lists.unselected] == 0).all(), "dkv of an unselected key is not 0")
        if expected.dsink is not None:
            found.compare("dsink", dsink, expected.dsink)
        if p_sum is not None:
            self.teacher(found, p_sum)

    def teacher(self, found: Comparison, p_sum) -> None:
        found.compare("p_sum", p_sum, self.expected.p_sum)
        found.require(
            (p_sum[~self.case.lists.valid] == 0).all(), "p_sum of an invalid entry is not 0"
        )
