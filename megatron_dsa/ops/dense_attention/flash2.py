"""Attention to one block with the flash-attn 2 package.

Its kernels have one head dim. Narrower values are padded here: padded earlier, they would exclude
the kernels that need no padding.
"""

import importlib.util

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
from megatron_dsa.ops.dispatch import OpCall, Reason, deterministic_mode
from megatron_dsa.versions import installed_version, parse_version

#: Since then windows are two arguments.
_MINIMUM = "2.7"


def reason(call: OpCall) -> Reason | None:
    """Return why flash-attn 2 cannot run this, or ``None``."""
    why = common_reason(call, pads_values=True)
    if why is not None:
        return why
    assert call.capability is not None
    if call.capability[0] not in (8, 9):
        return Reason(
            "flash-attn 2 has kernels for compute capability 8 and 9", f", this is {call.on()}"
        )
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return Reason(
            "missing: flash_attn is not installed", f"; pip install 'flash-attn>={_MINIMUM}'"
        )
    found = installed_version("flash-attn")
    if found is None or parse_version(found) < parse_version(_MINIMUM):
        return Reason(f"too old: flash-attn {found} found", f", >= {_MINIMUM} needed")
    return None


def forward(q, k, v, causal, scale, sequences: Dense | Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`.spec.BlockAttention`."""
    from flash_attn import flash_attn_interface as flash

    width = v.shape[-1]
    q, k, v = (to_kernel(x, sequences) for x in (q, k, padded(v, q.shape[-1])))
    options = {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    if isinstance(sequences, Packed):
        out, lse, *_ = flash._flash_attn_varlen_forward(
            q, k, v, *lengths(q, k, sequences), **options
        )
    else:
        out, lse, *_ = flash._flash_attn_forward(q, k, v, **options)
    return from_kernel(out[..., :width], sequences), lse_from_kernel(lse, sequences)


def backward(
    dout, q, k, v, out, lse, causal, scale, sequences: Dense | Packed
) -> tuple[torch.Tensor, ...]:
    """See :class:`.spec.BlockAttention`; ``dv`` may be a strided view."""
    from flash_attn import flash_attn_interface as flash

    width, full = v.shape[-1], q.shape[-1]
    dout, v, out = (padded(x, full) for x in (dout, v, out))
    dout, q, k, v, out = (to_kernel(x, sequences) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    tensors = (dout, q, k, v, out, lse_to_kernel(lse, sequences), dq, dk, dv)
    options = {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
        "deterministic": deterministic_mode(),
    }  # fmt: skip
    if isinstance(sequences, Packed):
        flash._flash_attn_varlen_backward(*tensors, *lengths(q, k, sequences), **options)
    else:
        flash._flash_attn_backward(*tensors, **options)
    return tuple(from_kernel(x, sequences) for x in (dq, dk, dv[..., :width]))
