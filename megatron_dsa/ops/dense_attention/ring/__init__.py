"""Dense causal attention, also over sequences that are sharded over context-parallel ranks.

Every rank keeps its queries. Blocks of keys and values reach it one rank after the other, over a
ring or from a gathered buffer; it attends to each with an ordinary kernel and combines the parts by
their log-sum-exp. The backward goes the same way round and returns every block's gradient.

* :mod:`.shards`: tokens of a rank, and the keys that they see;
* :mod:`.exchange` moves blocks, :mod:`.combine` joins the parts;
* :mod:`.attention`: the loop over blocks, differentiable; :mod:`.api`: the public operations.
"""

from megatron_dsa.ops.dense_attention.ring.api import token_shard
from megatron_dsa.ops.dense_attention.ring.attention import (
    gathered_latent_attention,
    ring_attention,
)
from megatron_dsa.ops.dense_attention.ring.shards import (
    ContiguousShard,
    PackedRuns,
    PackedZigzagShard,
    ZigzagShard,
)

__all__ = [
    "ContiguousShard",
    "PackedRuns",
    "PackedZigzagShard",
    "ZigzagShard",
    "gathered_latent_attention",
    "ring_attention",
    "token_shard",
]
