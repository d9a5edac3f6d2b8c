"""Public operations registered with ``torch.library`` for ``torch.compile``, without Megatron.

Names, results and errors match :mod:`megatron_dsa.dsa_kernels`; tensors and numbers replace layouts
and dataclasses (``docs/guide/torch.md``).
"""

from megatron_dsa.extras.torch_library.compressor import compress
from megatron_dsa.extras.torch_library.hyper_connections import (
    read_head,
    read_streams,
    write_streams,
)
from megatron_dsa.extras.torch_library.indexer import (
    dense_indexer_loss,
    indexer_topk,
    sparse_indexer_loss,
)
from megatron_dsa.extras.torch_library.key_lists import key_lists
from megatron_dsa.extras.torch_library.masked_attention import (
    key_bits,
    masked_attention,
    visible_bits,
)
from megatron_dsa.extras.torch_library.registration import policy_text
from megatron_dsa.extras.torch_library.sparse_attention import sparse_attention
from megatron_dsa.ops.hyper_connections.api import Connection, StreamsRead

__all__ = [
    "Connection",
    "StreamsRead",
    "compress",
    "dense_indexer_loss",
    "indexer_topk",
    "key_bits",
    "key_lists",
    "masked_attention",
    "policy_text",
    "read_head",
    "read_streams",
    "sparse_attention",
    "sparse_indexer_loss",
    "visible_bits",
    "write_streams",
]
