"""Sparse indexer loss with gradients in one TileLang kernel (Hopper, bf16)."""

from __future__ import annotations

import torch

from megatron_dsa.ops.common.arithmetic import lengths
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.hopper.sums import in_column_order_transposed, largest, units_for
from megatron_dsa.ops.indexer_loss.spec import IndexerGradients, IndexerLoss, SparseLossInputs
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs


def sparse(inputs: SparseLossInputs) -> IndexerLoss:
    from megatron_dsa.ops.indexer_loss.tilelang.program import DIM, MOST, compiled

    x, wanted = inputs.indexer, inputs.want_gradients
    q, k = x.q.contiguous(), x.k.contiguous()
    (queries, heads), width = q.shape[:2], inputs.indices.shape[1]
    if q.shape[2] != DIM or width > MOST or not x.relu:
        raise ValueError(
            f"the kernel takes index heads of {DIM}, at most {MOST} entries per list and the relu, "
            f"got {q.shape[2]}, {width}, relu={x.relu}: use another implementation"
        )
    fixed = wanted and deterministic_mode()
    runs = queries > 0 and width > 0
    value = (torch.empty if runs else torch.zeros)(queries, dtype=torch.float32, device=q.device)
    unused = value.new_empty(1, 1)
    if wanted:
        dq = torch.empty_like(q) if inputs.dq is None else inputs.dq
        dweights = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
        dk = torch.zeros_like(k, dtype=torch.int64 if fixed else torch.float32)
        units = units_per_one(x) if fixed else unused.view(1)
    else:
        dq, dk = q.new_empty(1, DIM), value.new_empty(1, DIM)
        dweights, units = unused, unused.view(1)
    if runs:
        compiled(heads, wanted, fixed)(
            q.view(-1, DIM), k, x.weights.float().contiguous().view(-1),
            inputs.indices.contiguous(), _lengths(inputs), inputs.teacher.contiguous(), value,
            dq.view(-1, DIM), dweights.view(-1), dk, units,
        )  # fmt: skip
    elif wanted:
        dq.zero_()
        dweights.zero_()
    if not wanted:
        return IndexerLoss(value.sum(), None)
    dk = dk.float().div_(units) if fixed else in_column_order_transposed(dk, DIM)
    return IndexerLoss(value.sum(), IndexerGradients(dq, dk, dweights))


def _lengths(inputs: SparseLossInputs) -> torch.Tensor:
    if inputs.topk_length is None:
        return lengths(inputs.indices, None)
    return inputs.topk_length.int().contiguous()


def units_per_one(inputs: IndexerInputs) -> torch.Tensor:
    """Return the key gradient's fixed-point scale.

    A query adds at most ``2 sum_h |w_h| max|q|`` to an element of dk.
    """
    q, weights = inputs.q, inputs.weights
    if q.numel() == 0:
        return q.new_ones(1, dtype=torch.float32)
    per_query = largest(q) * torch.linalg.vector_norm(weights.float(), ord=1, dim=1).max()
    return units_for(q.shape[0], per_query)
