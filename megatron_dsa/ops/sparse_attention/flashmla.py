"""Sparse attention forward through DeepSeek's FlashMLA (Hopper and Blackwell, bf16)."""

from __future__ import annotations

import inspect
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from megatron_dsa.ops.dispatch import on_meta
from megatron_dsa.ops.dispatch.packages import FLASH_MLA
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.padding import padded_heads, with_heads

if TYPE_CHECKING:
    from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs

WIDTH = 128
HEADS = (64, 128)
_ARGUMENTS = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")


def probe(call: OpCall) -> str | None:
    import flash_mla

    function = getattr(flash_mla, "flash_mla_sparse_fwd", None)
    if function is None:
        return f"too old: this flash_mla has no flash_mla_sparse_fwd; {FLASH_MLA.install}"
    reason = _signature_complaint(function)
    if reason is not None or on_meta():
        return reason
    return _lse_complaint(function)


def _signature_complaint(function) -> str | None:
    parameters = inspect.signature(function).parameters
    missing = [name for name in _ARGUMENTS if name not in parameters]
    required = [
        name
        for name, parameter in parameters.items()
        if name not in _ARGUMENTS and parameter.default is inspect.Parameter.empty
    ]
    if not missing and not required:
        return None
    found = ", ".join(parameters)
    return (
        f"unknown signature: flash_mla_sparse_fwd({found}) lacks {missing or 'nothing'} and "
        f"requires {required or 'nothing'} beyond {', '.join(_ARGUMENTS)}; {FLASH_MLA.install}"
    )


@lru_cache(maxsize=4)
def _lse_complaint(function) -> str | None:
    """Reject FlashMLA versions before 2026, whose base-2 lse corrupts gradients."""
    q = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(WIDTH, 1, 576, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(WIDTH, dtype=torch.int32, device="cuda").view(1, 1, -1)
    lse = float(function(q, kv, indices, 1.0)[2][0, 0])
    if math.isclose(lse, math.log(WIDTH), rel_tol=1e-3):
        return None
    return (
        f"wrong lse: this flash_mla returns {lse:.3f} for {WIDTH} equal logits, the natural log "
        f"is {math.log(WIDTH):.3f} (copies from before 2026 use base 2); {FLASH_MLA.install}"
    )


def padded(inputs: SparseAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    indices, heads = inputs.indices, padded_heads(inputs.q.shape[1], HEADS)
    if inputs.padded_q is not None and inputs.padded_q.shape[1] == heads:
        q = inputs.padded_q
    else:
        q = with_heads(inputs.q, heads, -2)
    if indices.shape[1] % WIDTH:
        indices = pad(indices, (0, -indices.shape[1] % WIDTH), value=-1)
    return q, indices.contiguous()


def forward(inputs: SparseAttentionInputs) -> tuple[torch.Tensor, torch.Tensor, None]:
    from flash_mla import flash_mla_sparse_fwd

    heads, sink, length = inputs.q.shape[1], inputs.sink, inputs.topk_length
    q, indices = padded(inputs)
    if sink is not None:
        sink = with_heads(sink.float(), q.shape[1], -1)
    if length is not None:
        length = length.clamp(0, inputs.indices.shape[1])
    out, _, lse = flash_mla_sparse_fwd(
        q,
        inputs.kv.contiguous().unsqueeze(1),
        indices.unsqueeze(1),
        inputs.softmax_scale,
        d_v=inputs.v_dim,
        attn_sink=sink,
        topk_length=length,
    )
    out, lse = out[:, :heads], lse[:, :heads]
    return out, torch.where(lse == float("inf"), float("-inf"), lse), None
