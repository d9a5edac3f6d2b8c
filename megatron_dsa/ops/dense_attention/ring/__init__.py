"""Dense causal attention on one or several context-parallel ranks.

Queries stay on their rank. Blocks of keys and values arrive over a ring or from a gathered buffer;
partial outputs are combined by their log-sum-exp.
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
