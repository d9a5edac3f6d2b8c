"""Index scores and selection in torch.

``torch.topk`` breaks ties arbitrarily, so it only determines the k-th *value*.
"""

from collections.abc import Sequence

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm, slices
from megatron_dsa.ops.common.scaling import has_triton
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Block, Seen

HEADS_AT_ONCE = 8


class Scores:
    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        return itemsize * (min(HEADS_AT_ONCE, heads) + 1)

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        heads_at_once = min(HEADS_AT_ONCE, inputs.q.shape[1])
        return block_scores(inputs, block.tokens, keys[block.lo : block.hi], heads_at_once)


class Selection:
    def bytes_per_score(self) -> int:
        return 32

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        visible = seen.columns(scores.shape[1])
        scores = scores.masked_fill_(~visible, float("-inf"))
        return _ascending(_best(scores, visible, topk), topk)


def _best(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Mark the ``min(topk, visible)`` best entries; ``scores`` of invisible keys are ``-inf``."""
    kth = torch.topk(scores, min(topk, scores.shape[1]), dim=-1).values[:, -1:]
    better = scores > kth
    ties = (scores == kth) & visible
    room = topk - better.sum(-1, keepdim=True, dtype=torch.int32)
    return better | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room))


def _ascending(mask: torch.Tensor, topk: int) -> torch.Tensor:
    slot = mask.cumsum(-1, dtype=torch.int32) - 1
    # Unselected keys go to a spare column, which avoids a host synchronisation.
    slot = torch.where(mask, slot, topk).long()
    columns = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    out = torch.full((mask.shape[0], topk + 1), -1, dtype=torch.int32, device=mask.device)
    return out.scatter_(1, slot, columns.expand_as(mask))[:, :topk]


def head_products(
    inputs: IndexerInputs, tokens: slice, keys: torch.Tensor, heads: slice
) -> torch.Tensor:
    q = inputs.q[tokens, heads]
    products = mm(q.flatten(0, 1), keys.t()).unflatten(0, q.shape[:2])
    return products.relu_() if inputs.relu else products


def block_scores(
    inputs: IndexerInputs, tokens: slice, keys: torch.Tensor, heads_at_once: int
) -> torch.Tensor:
    """Return the scores ``[r, w]`` for ``keys [w, DI]``, fp32 (fp64), bitwise repeatable."""
    weights = inputs.weights[tokens].to(accumulation_dtype(inputs.q.dtype))
    total = None
    for heads in slices(weights.shape[1], heads_at_once):
        products = head_products(inputs, tokens, keys, heads)
        part = torch.bmm(weights[:, None, heads], products).squeeze(1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def put(
    out: torch.Tensor,
    columns: torch.Tensor | None,
    seen: Seen,
    first: int,
    key_indices: torch.Tensor | None,
) -> None:
    """Write the selection of a block as key indices, in one launch on a GPU.

    Args:
        out: int32 ``[tokens, K]``, any stride between tokens; -1 marks empty entries.
        columns: int32 ``[tokens, K]``, selected columns of the block, then -1; ignored for queries
            with at most ``K`` visible keys, which select all; ``None`` if all queries do.
        first: slot of the block's first column.
        key_indices: int64, slot -> key index, or ``None`` for the identity.
    """
    topk = out.shape[1]
    if out.is_cuda and topk and has_triton():
        from megatron_dsa.ops.indexer_topk.triton import put as fused

        fused(out, columns, seen, first, key_indices)
        return
    found = seen.first(topk)
    if columns is not None:
        few = (seen.end - seen.start <= topk)[:, None]
        found = torch.where(few, found, columns, out=columns)
    slots = torch.where(found < 0, found, found + first)
    if key_indices is not None:
        keys = key_indices[slots.clamp_min(0).long()].to(slots.dtype)
        slots = torch.where(slots < 0, slots, keys)
    out.copy_(slots)


def sums_fit(
    tensors: Sequence[torch.Tensor], unseen: Sequence[torch.Tensor | None], limit: float
) -> torch.Tensor:
    """Return whether ``|q k| + |q k weights|`` of the largest elements is below ``limit``.

    ``unseen`` masks tokens to ignore.
    """
    if tensors[0].is_cuda and has_triton() and all(x.dtype != torch.float64 for x in tensors):
        from megatron_dsa.ops.indexer_topk.triton import sums_fit as fused

        return fused(tensors, unseen, limit)
    q, k, weights = map(largest, tensors, unseen)
    products = q * k
    # Sums must not overflow before or after multiplication by the weight.
    return torch.addcmul(products, products, weights) < limit


def largest(x: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    dtype, inf = accumulation_dtype(x.dtype), float("inf")
    if unseen is None:
        return torch.linalg.vector_norm(x, inf, dtype=dtype)
    tokens = torch.linalg.vector_norm(x, inf, dim=tuple(range(1, x.dim())), dtype=dtype)
    return tokens.masked_fill_(unseen, 0.0).amax()
