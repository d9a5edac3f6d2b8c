"""Index scores of a block of queries, a few index heads at a time (shared by top-k and losses)."""

from __future__ import annotations

import torch

from megatron_dsa.numerics.arithmetic import accumulation_dtype, mm, slices
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs


def head_products(inputs: IndexerInputs, rows: slice, keys: torch.Tensor, heads: slice):
    """Return ``q[rows, heads] . keys`` as ``[r, h, w]``, after the relu if there is one."""
    q = inputs.q[rows, heads]
    products = mm(q.flatten(0, 1), keys.t()).unflatten(0, q.shape[:2])
    return products.relu_() if inputs.relu else products


def block_scores(inputs: IndexerInputs, rows: slice, keys: torch.Tensor, heads_at_once: int):
    """Return the scores ``[r, w]`` of query rows against ``keys [w, DI]``, in fp32 (or fp64).

    The sum over index heads is taken in a fixed order, so equal inputs give bitwise equal scores.
    """
    weights = inputs.weights[rows].to(accumulation_dtype(inputs.q.dtype))
    total = None
    for heads in slices(weights.shape[1], heads_at_once):
        products = head_products(inputs, rows, keys, heads)
        part = torch.bmm(weights[:, None, heads], products).squeeze(1)
        total = part if total is None else total.add_(part)
    return total
