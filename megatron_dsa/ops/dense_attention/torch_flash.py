"""Adapter of torch's FlashAttention 2 kernels."""

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import Lengths, common_reason
from megatron_dsa.ops.dispatch import OpCall, Reason


def reason(call: OpCall) -> Reason | None:
    why = common_reason(call, pads_values=True)
    if why is not None:
        return why
    if torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        return Reason("this build of torch has no flash-attention kernels for CUDA")
    return None


def forward(q, k, v, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=scale
    )
    return out, lse


def backward(dout, q, k, v, out, lse, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, ...]:
    # The kernel requires a seed even without dropout.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed[:0], scale=scale
    )
