"""Adapter of FlashAttention 4 (package flash-attn-4), whose values may be narrower than keys.

The adapter calls private functions because the backward needs ``out`` and ``lse`` of all blocks.
"""

import importlib
import inspect
from functools import cache

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import Lengths
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.packages import BROKEN, FLASH_ATTENTION_4, import_error
from megatron_dsa.ops.dispatch.support import OpCall

_INTERFACE = "flash_attn.cute.interface"
_SHARED = (
    *("q", "k", "v", "softmax_scale", "causal"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
)
_CALLED = {
    "_flash_attn_fwd": (*_SHARED, "return_lse"),
    "_flash_attn_bwd": (*_SHARED, "out", "dout", "lse", "deterministic"),
}


def problem() -> str | None:
    return FLASH_ATTENTION_4.problem() or _import_problem()


def reason(_call: OpCall) -> str | None:
    return _import_problem()


@cache
def _import_problem() -> str | None:
    if (error := import_error(_INTERFACE)) is not None:
        return f"{BROKEN}: {_INTERFACE} cannot be imported ({error})"
    interface = importlib.import_module(_INTERFACE)
    for name, arguments in _CALLED.items():
        function = getattr(interface, name, None)
        if function is None:
            return f"changed: {_INTERFACE} has no {name}; {_known()}"
        unknown = sorted(set(arguments) - set(inspect.signature(function).parameters))
        if unknown:
            return f"changed: {name} of {_INTERFACE} has no {' and no '.join(unknown)}; {_known()}"
    return None


def _known() -> str:
    return f"pip install '{FLASH_ATTENTION_4.distribution}=={FLASH_ATTENTION_4.minimum}'"


def _options(lengths: Lengths, causal: bool, scale: float) -> dict:
    return {
        "softmax_scale": scale, "causal": causal, "cu_seqlens_q": lengths.cu_q,
        "cu_seqlens_k": lengths.cu_k, "max_seqlen_q": lengths.max_q, "max_seqlen_k": lengths.max_k,
    }  # fmt: skip


def forward(q, k, v, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    interface = importlib.import_module(_INTERFACE)
    options = _options(lengths, causal, scale)
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse


def backward(dout, q, k, v, out, lse, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, ...]:
    interface = importlib.import_module(_INTERFACE)
    options = _options(lengths, causal, scale) | {"deterministic": deterministic_mode()}
    return interface._flash_attn_bwd(q, k, v, out, dout, lse, **options)
