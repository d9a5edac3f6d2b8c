"""Scores and selection through cuDNN's front end (Hopper, bf16, index dim 128).

Bridged here: its scores would fill an ``S x S`` fp32 buffer, so it runs on one block of queries at
a time, with the block's position under the diagonal as a causal offset (its mask is aligned to the
top left); ``ratio`` defaults to 4 there; index heads come in 16, 32 or 64. Selection treats
``+0`` and ``-0`` as different scores; both are common results of the relu and equal here.
"""

import torch

from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Block, Seen
from megatron_dsa.ops.padding import padded_heads, with_heads


class Scores:
    """``indexer_scores`` of a block."""

    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        return itemsize  # products stay on the chip

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        from cudnn import DSA

        q, weights = inputs.q[block.tokens], inputs.weights[block.tokens]
        heads = padded_heads(q.shape[1], (16, 32, 64))
        # The i-th of r queries sees up to its own slot, the block's last but r - i. A compressed
        # slot is seen from several queries on: no part of the block is left out then.
        offset = block.width - (q.shape[0] if block.ratio == 1 else 0)
        scores = DSA.indexer_forward_wrapper(
            with_heads(q, heads, -2)[None],
            keys[block.lo : block.hi].contiguous()[None, :, None],
            with_heads(weights, heads, -1)[None],
            ratio=1,
            qhead_per_kv_head=heads,
            sm_scale=1.0,
            q_causal_offsets=torch.full((1,), offset, dtype=torch.int32, device=q.device),
        )["scores"]
        return scores[0]


class Selection:
    """``indexer_topk`` of a block."""

    def bytes_per_score(self) -> int:
        return 10  # measured: its documentation does not say what it allocates

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        """Visible keys must be the first columns of the block (true for unpacked batches)."""
        from cudnn import DSA

        scores = scores.add_(0.0)  # -0 + 0 = +0
        return DSA.indexer_top_k_wrapper(
            scores, seen.end, topk, return_val=False, tie_break=1, deterministic=True
        )["indices"]
