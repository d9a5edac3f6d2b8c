"""Dense causal attention, also over context-parallel ranks.

Ranks keep their queries. Blocks of keys and values arrive over a ring or from a gathered buffer;
partial outputs are combined by their log-sum-exp. The backward visits the blocks again.

* :mod:`.shards`: tokens of a rank, and the keys that they see;
* :mod:`.exchange` moves blocks, :mod:`.combine` joins partial outputs;
* :mod:`.attention`: the differentiable loop; :mod:`.api`: the public operations.
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
