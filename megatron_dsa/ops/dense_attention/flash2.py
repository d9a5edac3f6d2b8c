"""Adapter of FlashAttention 2 (package flash-attn)."""

import importlib.util

import torch

from megatron_dsa.ops.dense_attention.flash_shapes import Lengths, common_reason
from megatron_dsa.ops.dispatch import OpCall, Reason, deterministic_mode
from megatron_dsa.ops.dispatch.packages import BROKEN, import_error
from megatron_dsa.versions import installed_version, parse_version

#: flash-attn 2.7 split ``window_size`` into two arguments.
_MINIMUM = "2.7"


def reason(call: OpCall) -> Reason | None:
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
    if torch.cuda.is_available() and (error := import_error("flash_attn")) is not None:
        return Reason(f"{BROKEN}: flash_attn cannot be imported", f" ({error}); reinstall it")
    return None


def _options(causal: bool, scale: float) -> dict:
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip


def forward(q, k, v, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn import flash_attn_interface as flash

    options = _options(causal, scale) | {"return_softmax": False}
    if lengths.cu_q is None:
        out, lse, *_ = flash._flash_attn_forward(q, k, v, **options)
    else:
        out, lse, *_ = flash._flash_attn_varlen_forward(q, k, v, *lengths, **options)
    return out, lse


def backward(dout, q, k, v, out, lse, lengths: Lengths, causal, scale) -> tuple[torch.Tensor, ...]:
    from flash_attn import flash_attn_interface as flash

    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    tensors = (dout, q, k, v, out, lse, *gradients)
    options = _options(causal, scale) | {"deterministic": deterministic_mode()}
    if lengths.cu_q is None:
        flash._flash_attn_backward(*tensors, **options)
    else:
        flash._flash_attn_varlen_backward(*tensors, *lengths, **options)
    return gradients
