"""The operations that a layer calls in a training step: one declaration, read by all who need it.

* :mod:`.attention`: which attention selected keys get and which all visible ones, and what
  tensor-parallel ranks divide;
* :mod:`.layers`: the operations of a layer, forward and backward, and the keys of each;
* :mod:`.streams`: the operations of its hyper-connections;
* :mod:`.calls`: descriptions of the calls, which both read.

Start-up chooses and compiles the operations (:mod:`megatron_dsa.layers.warm_up`), ``info`` and the
planner list them, FLOP counts add them up (:mod:`megatron_dsa.metrics.flops`). A test compares them
with the calls of real steps, for every stage and preset.
"""

from megatron_dsa.layers.required_ops.attention import (
    MASKED_OPERATIONS,
    AttentionChoice,
    SelectedAttention,
    VisibleAttention,
    attention_of,
    selected_attention,
    tensor_parallel_mode,
    visible_attention,
)
from megatron_dsa.layers.required_ops.layers import (
    Keys,
    RequiredOp,
    called_ops,
    required_ops,
    visible_ops,
)
from megatron_dsa.layers.required_ops.streams import stream_ops

__all__ = [
    "MASKED_OPERATIONS",
    "AttentionChoice",
    "Keys",
    "RequiredOp",
    "SelectedAttention",
    "VisibleAttention",
    "attention_of",
    "called_ops",
    "required_ops",
    "selected_attention",
    "stream_ops",
    "tensor_parallel_mode",
    "visible_attention",
    "visible_ops",
]
