"""Attention to one block with FlashAttention 4 (package flash-attn-4).

Private functions are called, because the backward takes ``out`` and ``lse`` of the whole attention;
their arguments are compared at import.
"""

import importlib
import inspect
from functools import cache

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import (
    from_kernel,
    lengths,
    lse_from_kernel,
    lse_to_kernel,
    to_kernel,
)
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.packages import FLASH_ATTENTION_4
from megatron_dsa.ops.dispatch.support import OpCall

_INTERFACE = "flash_attn.cute.interface"
_SHARED = (
    *("q", "k", "v", "softmax_scale", "causal"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
)
#: Functions of the interface -> arguments that they are called with.
_CALLED = {
    "_flash_attn_fwd": (*_SHARED, "return_lse"),
    "_flash_attn_bwd": (*_SHARED, "out", "dout", "lse", "deterministic"),
}


def problem() -> str | None:
    """Return why the installed package cannot be used on any GPU, or ``None``."""
    return FLASH_ATTENTION_4.problem() or _import_problem()


def reason(_call: OpCall) -> str | None:
    """Return why the package, found in a version that fits, cannot be used, or ``None``."""
    return _import_problem()


@cache
def _import_problem() -> str | None:
    # It takes seconds, so it is the last question.
    try:
        interface = importlib.import_module(_INTERFACE)
    # Kernels are compiled by a stack of packages; each fails in ways of its own.
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return f"broken: {_INTERFACE} cannot be imported: {type(error).__name__}: {first_line}"
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


def _options(q, k, causal, scale, sequences: Dense | Packed) -> dict:
    cu_q, cu_k, max_q, max_k = lengths(q, k, sequences)
    return {
        "softmax_scale": scale, "causal": causal, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q, "max_seqlen_k": max_k,
    }  # fmt: skip


def forward(q, k, v, causal, scale, sequences: Dense | Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`.spec.BlockAttention`."""
    interface = importlib.import_module(_INTERFACE)
    q, k, v = (to_kernel(x, sequences) for x in (q, k, v))
    options = _options(q, k, causal, scale, sequences)
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return from_kernel(out, sequences), lse_from_kernel(lse, sequences)


def backward(
    dout, q, k, v, out, lse, causal, scale, sequences: Dense | Packed
) -> tuple[torch.Tensor, ...]:
    """See :class:`.spec.BlockAttention`."""
    interface = importlib.import_module(_INTERFACE)
    dout, q, k, v, out = (to_kernel(x, sequences) for x in (dout, q, k, v, out))
    options = _options(q, k, causal, scale, sequences)
    gradients = interface._flash_attn_bwd(
        q, k, v, out, dout, lse_to_kernel(lse, sequences), deterministic=deterministic_mode(),
        **options,
    )  # fmt: skip
    return tuple(from_kernel(x, sequences) for x in gradients)
