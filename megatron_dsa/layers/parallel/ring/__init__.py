"""Dense causal attention, also over sequences that are sharded over context-parallel ranks.

Every rank keeps its queries. Blocks of keys and values come to it one rank's share after the other,
over a ring or out of what was gathered; it attends to each of them with an ordinary attention
kernel and combines the parts by their log-sum-exp. The backward goes the same way round and brings
every block's gradient home.

* :mod:`.shards` and :mod:`.runs` say which tokens a rank holds and what they see of another rank's;
* :mod:`megatron_dsa.ops.dense_attention.blocks` chooses the kernel that attends to one block;
* :mod:`.exchange` moves blocks, :mod:`.payload` says what is in one (keys and values, or MLA's
  latent), :mod:`.combine` joins the parts;
* :mod:`.loop` is the loop over blocks, :mod:`.attention` makes it differentiable and :mod:`.api`
  makes shards of a layout and describes calls to dispatch.
"""

from megatron_dsa.layers.parallel.ring.api import token_shard
from megatron_dsa.layers.parallel.ring.attention import (
    gathered_latent_attention,
    ring_attention,
)
from megatron_dsa.layers.parallel.ring.runs import PackedRuns
from megatron_dsa.layers.parallel.ring.shards import ContiguousShard, PackedZigzagShard, ZigzagShard

__all__ = [
    "ContiguousShard",
    "PackedRuns",
    "PackedZigzagShard",
    "ZigzagShard",
    "gathered_latent_attention",
    "ring_attention",
    "token_shard",
]
