"""Scores and selection through cuDNN's front end (Hopper, bf16, index dim 128).

Bridged: blocks of queries instead of an ``S x S`` fp32 buffer, with a causal offset (the mask is
aligned to the top left); ``ratio``, which defaults to 4; 16, 32 or 64 index heads; ``+0`` and
``-0``, which differ.
"""

import torch

from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Block, Seen
from megatron_dsa.ops.padding import padded_heads, with_heads


class Scores:
    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        return itemsize

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        from cudnn import DSA

        q, weights = inputs.q[block.tokens], inputs.weights[block.tokens]
        heads = padded_heads(q.shape[1], (16, 32, 64))
        # Query i of r sees up to the block's last slot but r - i; with compressed slots, mask
        # nothing.
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
    def bytes_per_score(self) -> int:
        return 10  # measured

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        """Select; visible keys must be the first columns (unpacked batches)."""
        from cudnn import DSA

        scores = scores.add_(0.0)  # -0 + 0 = +0
        return DSA.indexer_top_k_wrapper(
            scores, seen.end, topk, return_val=False, tie_break=1, deterministic=True
        )["indices"]
