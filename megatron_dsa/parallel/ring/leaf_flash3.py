"""Attention to one block with FlashAttention-3 (Hopper), which knows keys wider than values."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from megatron_dsa.dispatch import deterministic_mode
from megatron_dsa.dispatch.support import Problem
from megatron_dsa.parallel.ring.flash_shapes import (
    common_reason,
    from_kernel,
    lengths,
    lse_from_kernel,
    lse_to_kernel,
    to_kernel,
)
from megatron_dsa.parallel.ring.sequences import Dense, Packed

_MODULE = "flash_attn_interface"


def reason(problem: Problem) -> str | None:
    """Return why FlashAttention-3 cannot run this, or ``None``."""
    why = common_reason(problem)
    if why is not None:
        return why
    if problem.capability != (9, 0):
        return f"FlashAttention-3 has kernels for compute capability 9.0, this is {problem.on()}"
    if importlib.util.find_spec(_MODULE) is None:
        return (
            f"missing: {_MODULE} is not installed; build the hopper/ folder of "
            "github.com/Dao-AILab/flash-attention"
        )
    if problem.deterministic and problem.qk_dim > 192:
        return "its backward is not deterministic for head dims above 192"
    return None


def _kernels():
    importlib.import_module(_MODULE)  # registers the operators
    return torch.ops.flash_attn_3


def forward(q, k, v, causal, scale, sequences: Dense | Packed):
    """Return ``out [Sq, H, Dv]`` in the dtype of ``q`` and ``lse`` fp32 ``[Sq, H]``."""
    q, k, v = (to_kernel(x, sequences) for x in (q, k, v))
    cu_q, cu_k, max_q, max_k = lengths(q, k, sequences)
    no_new_keys, no_query_of_values, no_out = (None, None), None, None
    no_pages, no_rope, no_scales = (None, None, None), (None, None, None), (None, None, None)
    out, lse, *_ = _kernels().fwd(
        q, k, v, *no_new_keys, no_query_of_values, no_out,
        cu_q, cu_k, None, None, None, max_q, max_k,
        *no_pages, *no_rope, *no_scales,
        scale, causal, -1, -1, 0, 0.0, True, None,
        1,  # splits of the keys: more would be summed in fp32 buffers, for few queries
        None, 0,
    )  # fmt: skip
    return from_kernel(out, sequences), lse_from_kernel(lse, sequences)


def backward(dout, q, k, v, out, lse, causal, scale, sequences: Dense | Packed):
    """Return ``dq``, ``dk`` and ``dv`` in the dtype of ``q``."""
    dout, q, k, v, out = (to_kernel(x, sequences) for x in (dout, q, k, v, out))
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    cu_q, cu_k, max_q, max_k = lengths(q, k, sequences)
    _kernels().bwd(
        dout, q, k, v, out, lse_to_kernel(lse, sequences), *gradients,
        cu_q, cu_k, None, None, max_q, max_k,
        scale, causal, -1, -1, 0.0, deterministic_mode(), 0,
    )  # fmt: skip
    return tuple(from_kernel(x, sequences) for x in gradients)
