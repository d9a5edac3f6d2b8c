"""Launches of the Hopper kernels for index scores (index dim 128) and selection."""

from __future__ import annotations

import torch

from megatron_dsa.ops.common.arithmetic import part_of
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Block, Seen
from megatron_dsa.ops.padding import padded_heads, with_heads


class Scores:
    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        return itemsize

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        q, weights = part_of(inputs.q, block.tokens), part_of(inputs.weights, block.tokens)
        scales = inputs.key_scales
        if scales is not None:
            # Copy the slice: kernel arguments must be 16-byte aligned.
            scales = scales[block.lo : block.hi].clone()
        keys = part_of(keys, slice(block.lo, block.hi))
        return scores(q, keys, weights, seen, key_scales=scales, relu=inputs.relu)


class Selection:
    takes_out = True

    def bytes_per_score(self) -> int:
        return 0

    def __call__(
        self, scores: torch.Tensor, seen: Seen, topk: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Select the best keys; fp32 ``scores`` with any stride between queries stay unchanged."""
        from megatron_dsa.ops.indexer_topk.tilelang.selection import (
            TOPK,
            aim,
            kernel_for,
            tiling_for,
        )

        if not 1 <= topk <= TOPK:
            raise ValueError(f"topk must be from 1 to {TOPK}, got {topk}")
        if scores.stride(1) != 1:
            scores = scores.contiguous()
        if out is None:
            out = torch.empty(scores.shape[0], topk, dtype=torch.int32, device=scores.device)
        width = scores.shape[1]
        wanted = aim(tiling_for(width, topk), topk)
        kernel_for(width, topk)(scores, seen.start, seen.end, out, wanted)
        return out


def scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    seen: Seen,
    *,
    key_scales: torch.Tensor | None = None,
    relu: bool = True,
) -> torch.Tensor:
    """Return fp32 ``[Sq, width]``: ``sum_h w[t, h] relu(q[t, h] . k[s])`` for visible keys.

    Sums are fp32 in a fixed order, which for fp8 is the engines' order. Entries of invisible keys
    are uninitialised.

    Args:
        q: ``[Sq, HI, 128]`` bf16 or fp8 (e4m3), HI at most 64.
        keys: ``[width, 128]``, same dtype.
        weights: ``[Sq, HI]``, multiplied by the scales of fp8 q.
        key_scales: fp32 ``[width]``, not negative, only for fp8.
    """
    from megatron_dsa.ops.indexer_topk.tilelang.scores import DIM, HEADS, compiled

    heads = padded_heads(q.shape[1], HEADS)
    kernel = compiled(heads, str(q.dtype).removeprefix("torch."), relu)
    out = torch.empty(q.shape[0], keys.shape[0], dtype=torch.float32, device=q.device)
    kernel(
        with_heads(q, heads, -2).view(-1, DIM),
        keys.contiguous(),
        with_heads(weights.float(), heads, -1).view(-1),
        torch.empty(1, device=q.device) if key_scales is None else key_scales,
        seen.start,
        seen.end,
        out,
        processors(q.device),
    )
    return out
