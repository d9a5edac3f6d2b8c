"""Index scores (index dim 128) and selection through this package's own kernels (Hopper).

One kernel of scores is compiled per head count, relu and order of sums, three of selection for
short rows, long rows and many keys, each when it is first called.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.blocks import Block, Seen
from megatron_dsa.ops.padding import padded_heads, with_heads


class Scores:
    """``indexer_scores`` of a block (bf16 or fp8)."""

    engine = False

    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        """Only the scores: products stay on the chip."""
        return itemsize

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        """Return the scores ``[rows, width]``; where none is seen nothing is written."""
        q, weights = inputs.q[block.rows], inputs.weights[block.rows]
        scales = inputs.key_scales
        if scales is not None:
            # A copy: the kernel's arguments begin at multiples of 16 bytes.
            scales = scales[block.lo : block.hi].clone()
        return scores(
            q, keys[block.lo : block.hi], weights, seen, key_scales=scales, relu=inputs.relu,
            engine=self.engine,
        )  # fmt: skip


class EngineScores(Scores):
    """``indexer_engine_scores`` of a block: fp8, summed in the order of inference engines."""

    engine = True


class Selection:
    """``indexer_topk`` of a block, for every layout."""

    takes_out = True

    def bytes_per_score(self) -> int:
        """Nothing: candidates stay on the chip."""
        return 0

    def __call__(
        self, scores: torch.Tensor, seen: Seen, topk: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int32 ``[rows, topk]``: ascending columns of the best seen scores, then -1.

        They are written to ``out``, if it is given. ``scores`` (fp32) are left as they are; their
        rows may have any stride. Scores that are
        NaN may be selected, each at most once.

        Raises:
            ValueError: ``topk`` is above what the kernel has room for (4096).
        """
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
    engine: bool = False,
) -> torch.Tensor:
    """Return fp32 ``[rows, width]``: ``sum_h w[t, h] relu(q[t, h] . k[s])`` where it is seen.

    Sums are fp32 in a fixed order. Entries that are not seen are uninitialised.

    Args:
        q: ``[rows, HI, 128]`` bf16 or fp8 (e4m3), HI at most 64.
        keys: ``[width, 128]`` of the same dtype.
        weights: ``[rows, HI]``, times the scales of q if it has any.
        seen: which columns each row sees.
        key_scales: fp32 ``[width]``, 0 or more; for fp8.
        relu: clamp each head's product at 0, or leave it.
        engine: add up in the order of :mod:`megatron_dsa.ops.indexer_topk.engine`.

    Raises:
        ValueError: heads or a dtype that the kernel does not have.
    """
    from megatron_dsa.ops.indexer_topk.tilelang.scores import DIM, HEADS, compiled

    heads = padded_heads(q.shape[1], HEADS)
    kernel = compiled(heads, str(q.dtype).removeprefix("torch."), relu, engine)
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
