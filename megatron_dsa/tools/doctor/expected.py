"""What is right: the plain references of ``megatron_dsa.ops`` in float64, some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.ops.indexer_loss.reference import kl_sum
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.indexer_topk.reference import index_scores
from megatron_dsa.ops.sparse_attention.reference import sparse_attention
from megatron_dsa.sequence.layout import Layout
from megatron_dsa.tools.doctor.cases import AttentionCase, Lists

#: Temporary memory that the references may take.
BUDGET_BYTES = 2**30


def _chunks(rows: int, bytes_per_row: int):
    step = max(1, BUDGET_BYTES // bytes_per_row)
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


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
    """Compute values and gradients by autograd."""
    kv = case.kv.double().requires_grad_()
    sink = None if case.sink is None else case.sink.double().requires_grad_()
    (rows, heads, dim), width = case.q.shape, case.indices.shape[1]
    results = []
    # gathered keys with their gradients, and several matrices of logits
    for chunk in _chunks(rows, 8 * width * (6 * dim + 8 * heads)):
        q = case.q[chunk].double().requires_grad_()
        indices, length = case.indices[chunk], case.length[chunk]
        out, lse = sparse_attention(
            q, kv, indices, v_dim=case.v_dim, softmax_scale=case.softmax_scale,
            topk_length=length, sink=sink,
        )  # fmt: skip
        out.backward(case.dout[chunk].double())
        assert q.grad is not None
        with torch.no_grad():
            results.append((out.detach(), lse.detach(), _p_sum(case, chunk, lse), q.grad))
    out, lse, p_sum, dq = (torch.cat(parts) for parts in zip(*results, strict=True))
    assert kv.grad is not None
    return ExpectedAttention(out, lse, p_sum, dq, kv.grad, None if sink is None else sink.grad)


def _p_sum(case: AttentionCase, chunk: slice, lse: torch.Tensor) -> torch.Tensor:
    """Head sum of the probabilities ``[r, K]``; 0 where nothing is selected."""
    indices = case.indices[chunk]
    place = torch.arange(indices.shape[1], device=indices.device)
    valid = (indices >= 0) & (indices < len(case.kv)) & (place < case.length[chunk, None])
    keys = case.kv[torch.where(valid, indices, 0).long()].double()
    logits = torch.einsum("qhd,qkd->qhk", case.q[chunk].double(), keys) * case.softmax_scale
    if case.sink is not None:
        lse = torch.logaddexp(lse, case.sink.double().expand_as(lse))
    return torch.exp(logits - lse[..., None]).sum(1).masked_fill(~valid, 0.0)


@dataclass(frozen=True)
class ExpectedLoss:
    """Float64 loss (a scalar) and gradients of the indexer's inputs."""

    loss: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor


def expected_loss(inputs: IndexerInputs, lists: Lists, teacher: torch.Tensor) -> ExpectedLoss:
    """Compute the sparse indexer loss and its gradients by autograd."""
    k = inputs.k.double().requires_grad_()
    rows, heads, dim = inputs.q.shape
    width = lists.indices.shape[1]
    loss = torch.zeros((), dtype=torch.float64, device=k.device)
    dq, dweights = [], []
    for chunk in _chunks(rows, 8 * width * (3 * dim + 5 * heads)):
        q = inputs.q[chunk].double().requires_grad_()
        weights = inputs.weights[chunk].double().requires_grad_()
        valid = lists.valid[chunk]
        # Invalid entries take a row of zeros: NaN times a gradient of 0 would be NaN.
        table = torch.cat([k, k.new_zeros(1, dim)])
        keys = table[torch.where(valid, lists.indices[chunk], len(k)).long()]
        products = torch.einsum("qhd,qkd->qhk", q, keys)
        products = products.relu() if inputs.relu else products
        scores = torch.einsum("qh,qhk->qk", weights, products)
        value = kl_sum(scores, teacher[chunk].double(), valid)
        value.backward()
        loss += value.detach()
        assert q.grad is not None and weights.grad is not None
        dq.append(q.grad)
        dweights.append(weights.grad)
    assert k.grad is not None
    return ExpectedLoss(loss, torch.cat(dq), k.grad, torch.cat(dweights))


def expected_scores(inputs: IndexerInputs, rows: torch.Tensor) -> torch.Tensor:
    """Index scores ``[len(rows), Skv]`` of some query rows."""
    k = inputs.k.double()
    per_row = 8 * 3 * inputs.q.shape[1] * len(k)
    return torch.cat([
        index_scores(
            inputs.q[rows[chunk]].double(), k, inputs.weights[rows[chunk]].double(), inputs.relu
        )
        for chunk in _chunks(len(rows), per_row)
    ])  # fmt: skip


def visible_keys(layout: Layout, rows: torch.Tensor) -> torch.Tensor:
    """Bool ``[len(rows), Skv]``; for layouts whose slots are the rows of the key buffer."""
    slots = torch.arange(layout.num_keys, device=rows.device)
    return (slots >= layout.start[rows, None]) & (slots < layout.end[rows, None])


def best_keys(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Bool ``[r, Skv]``: the ``min(topk, visible)`` best visible keys, ties to the smallest."""
    hidden = scores.masked_fill(~visible, float("-inf"))
    order = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(1, order, True) & visible
