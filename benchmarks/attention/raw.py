"""FlashMLA's sparse forward without this package's adapter.

Inputs are converted before timing: queries of 64 or 128 heads (zero padded), lists as wide as
required, all entries valid. Adapter: :mod:`megatron_dsa.ops.sparse_attention.flashmla`.
"""

import torch

from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs

#: The way, and the implementation with the same kernel.
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
    """Return ``out`` and ``lse`` of the case's heads; ``-inf`` without keys."""
    out, _, lse = result
    lse = lse[:, :heads]
    return out[:, :heads], torch.where(lse == float("inf"), float("-inf"), lse)
