"""Adapter of cuDNN's index scores and selection for Hopper, bf16 and index dim 128.

The adapter runs blocks of queries with a causal offset to avoid an ``S x S`` buffer, sets ``ratio``
to 1, pads heads to 16, 32 or 64, and replaces ``-0``, which cuDNN does not treat as ``+0``.
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
        # The last query attends to all slots of the block, each earlier query to one slot fewer;
        # compressed slots need no mask.
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
        return 10  # measured temporary bytes

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        """Select keys of unpacked batches, whose visible keys are the first columns."""
        from cudnn import DSA

        scores = scores.add_(0.0)  # -0 + 0 = +0
        return DSA.indexer_top_k_wrapper(
            scores, seen.end, topk, return_val=False, tie_break=1, deterministic=True
        )["indices"]
