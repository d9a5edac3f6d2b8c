"""Attention to one block with torch's own FlashAttention-2, packed or not; values are padded."""

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import (
    common_reason,
    from_kernel,
    lengths,
    lse_from_kernel,
    lse_to_kernel,
    padded,
    to_kernel,
)
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import OpCall, Reason


def reason(call: OpCall) -> Reason | None:
    """Return why torch's flash kernels cannot run this, or ``None``."""
    why = common_reason(call, pads_values=True)
    if why is not None:
        return why
    if torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        return Reason("this build of torch has no flash-attention kernels for CUDA")
    return None


def forward(q, k, v, causal, scale, sequences: Dense | Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`.spec.BlockAttention`."""
    width = v.shape[-1]
    q, k, v = (to_kernel(x, sequences) for x in (q, k, padded(v, q.shape[-1])))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths(q, k, sequences), 0.0, causal, False, scale=scale
    )
    return from_kernel(out[..., :width], sequences), lse_from_kernel(lse, sequences)


def backward(
    dout, q, k, v, out, lse, causal, scale, sequences: Dense | Packed
) -> tuple[torch.Tensor, ...]:
    """See :class:`.spec.BlockAttention`; ``dv`` may be a strided view."""
    width, full = v.shape[-1], q.shape[-1]
    dout, v, out = (padded(x, full) for x in (dout, v, out))
    dout, q, k, v, out = (to_kernel(x, sequences) for x in (dout, q, k, v, out))
    # State of the dropout's random numbers: there is none, but the kernel wants the tensors.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse_to_kernel(lse, sequences), *lengths(q, k, sequences), 0.0, causal,
        seed, seed[:0], scale=scale,
    )  # fmt: skip
    return tuple(from_kernel(x, sequences) for x in (dq, dk, dv[..., :width]))
