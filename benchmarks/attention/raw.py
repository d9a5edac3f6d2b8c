"""FlashMLA's sparse forward as its own users call it: without this package's adapter.

The tensors are what the kernel takes before the clock starts: queries of 64 or 128 heads (zeros
behind those of the case), lists as wide as it wants, every entry a key. What the adapter does
around the kernel (see :mod:`megatron_dsa.ops.sparse_attention.flashmla`) is left out.
"""

import torch

from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs

#: The way of measuring, and the implementation that calls the same kernel.
WAY, ADAPTER = "flashmla-raw", "flashmla"


def forward(inputs: SparseAttentionInputs):
    """Return a function without arguments that runs the kernel once."""
    from flash_mla import flash_mla_sparse_fwd

    q, indices = flashmla.padded(inputs)
    kv, indices, sink = inputs.kv.contiguous()[:, None], indices[:, None], inputs.sink
    if sink is not None:
        sink = torch.nn.functional.pad(sink.float(), (0, q.shape[1] - len(sink)))
    return lambda: flash_mla_sparse_fwd(
        q, kv, indices, inputs.softmax_scale, d_v=inputs.v_dim, attn_sink=sink
    )


def as_ours(result, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and ``lse`` of the case's heads; rows without keys are ``-inf``."""
    out, _, lse = result
    lse = lse[:, :heads]
    return out[:, :heads], torch.where(lse == float("inf"), float("-inf"), lse)
