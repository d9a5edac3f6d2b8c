"""Public operations: sparse, masked and dense attention, index selection, indexer losses.

The functions take plain tensors of flattened tokens (:mod:`megatron_dsa.ops.layout.layout`), need
no Megatron and run by dispatch (:mod:`megatron_dsa.ops.dispatch`).
"""

from megatron_dsa.ops.dense_attention.ring.api import dense_attention, gathered_latent_attention
from megatron_dsa.ops.indexer_loss.api import dense_indexer_loss, sparse_indexer_loss
from megatron_dsa.ops.indexer_loss.spec import ExpandedKeys, LatentKeys
from megatron_dsa.ops.indexer_loss.training import IndexerTraining
from megatron_dsa.ops.indexer_topk.api import indexer_topk
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.masked_attention.api import (
    MaskedAttentionOutput,
    key_bits,
    masked_attention,
    visible_bits,
)
from megatron_dsa.ops.sparse_attention.absorbed import (
    AbsorbedAttentionOutput,
    absorbed_attention,
)
from megatron_dsa.ops.sparse_attention.api import SparseAttentionOutput, sparse_attention

__all__ = [
    "AbsorbedAttentionOutput",
    "ExpandedKeys",
    "IndexerInputs",
    "IndexerTraining",
    "LatentKeys",
    "MaskedAttentionOutput",
    "SparseAttentionOutput",
    "absorbed_attention",
    "dense_attention",
    "dense_indexer_loss",
    "gathered_latent_attention",
    "indexer_topk",
    "key_bits",
    "masked_attention",
    "sparse_attention",
    "sparse_indexer_loss",
    "visible_bits",
]
