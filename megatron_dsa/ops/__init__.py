"""Operations, one folder each, with their implementations.

``api.py`` has the public function; ``spec.py`` the inputs, candidates in dispatch order, fake
kernels for memory plans, and reference; ``torch.py`` runs everywhere. Files and folders named after
a package hold fused implementations.
"""

from megatron_dsa.ops.compressor.spec import COMPRESSOR
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import Operation
from megatron_dsa.ops.hyper_connections import spec as hyper_connections
from megatron_dsa.ops.indexer_loss.spec import DENSE_LOSS, SPARSE_LOSS
from megatron_dsa.ops.indexer_topk.spec import ENGINE_SCORES, SCORES, TOPK
from megatron_dsa.ops.kda import spec as kda
from megatron_dsa.ops.key_lists.spec import KEY_LISTS
from megatron_dsa.ops.masked_attention.spec import BACKWARD as MASKED_BACKWARD
from megatron_dsa.ops.masked_attention.spec import FORWARD as MASKED_FORWARD
from megatron_dsa.ops.masked_attention.spec import KEY_BITS, VISIBLE_BITS
from megatron_dsa.ops.masked_attention.spec import PROBABILITIES as MASKED_PROBABILITIES
from megatron_dsa.ops.rope.spec import INDEX_ROTATION, NORM_ROPE, ROTATE
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD, PROBABILITIES

#: Operations by name, in the order of a training step.
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        hyper_connections.READ,
        COMPRESSOR,
        NORM_ROPE,
        ROTATE,
        INDEX_ROTATION,
        KEY_LISTS,
        SCORES,
        ENGINE_SCORES,
        TOPK,
        FORWARD,
        BACKWARD,
        PROBABILITIES,
        KEY_BITS,
        VISIBLE_BITS,
        MASKED_FORWARD,
        MASKED_BACKWARD,
        MASKED_PROBABILITIES,
        DENSE_ATTENTION,
        SPARSE_LOSS,
        DENSE_LOSS,
        kda.CONVOLUTION,
        kda.ATTENTION,
        kda.NORM,
        hyper_connections.WRITE,
        hyper_connections.HEAD,
    )
}
