"""Adapter of cuDNN's attention in torch, whose values may be narrower than keys.

Packed batches are unsupported: torch's backward mistakes the head dim for the longest length.
"""

from functools import cache

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import (
    common_reason,
    lse_from_kernel,
    lse_to_kernel,
)
from megatron_dsa.ops.dense_attention.sequences import Dense
from megatron_dsa.ops.dispatch import OpCall, Reason

#: First cuDNN versions with head dims above 128.
_WIDE_HOPPER, _WIDE_BLACKWELL = 91000, 91100


def reason(call: OpCall) -> Reason | None:
    why = common_reason(call)
    if why is not None:
        return why
    version = torch.backends.cudnn.version() or 0
    wide = max(call.qk_dim, call.v_dim) > 128
    hopper = call.capability == (9, 0) and version >= _WIDE_HOPPER
    dims = (call.qk_dim, call.v_dim)
    assert call.capability is not None
    blackwell = call.capability[0] == 10 and version >= _WIDE_BLACKWELL and dims == (192, 128)
    if wide and not (hopper or blackwell):
        return Reason(
            f"cuDNN {version} takes head dims up to 128 on {call.on()}",
            f" (wider ones on Hopper from {_WIDE_HOPPER}, 192/128 on Blackwell from "
            f"{_WIDE_BLACKWELL}), got {dims}",
        )
    return None


def forward(q, k, v, causal, scale, sequences: Dense) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (_heads_first(x, sequences) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return _tokens_first(out), lse_from_kernel(lse.reshape(lse.shape[:3]), sequences)


def backward(dout, q, k, v, out, lse, causal, scale, sequences: Dense) -> tuple[torch.Tensor, ...]:
    dout, q, k, v, out = (_heads_first(x, sequences) for x in (dout, q, k, v, out))
    lse = lse_to_kernel(lse, sequences)
    if _lse_dims(q.device) == 4:
        lse = lse.unsqueeze(-1)
    # The kernel requires a seed even without dropout.
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0,
        causal, scale=scale,
    )  # fmt: skip
    return tuple(map(_tokens_first, gradients))


@cache
def _lse_dims(device: torch.device) -> int:
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim()


def _heads_first(x: torch.Tensor, sequences: Dense) -> torch.Tensor:
    return x.unflatten(0, (-1, sequences.batch)).permute(1, 2, 0, 3)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3).flatten(0, 1)
