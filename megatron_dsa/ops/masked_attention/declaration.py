"""Masked dense attention: the operations and what implements them."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS

_HERE = __package__
#: Plain MLA of V3.2 (128 dims without rope, 64 with it, values of 128) and GLM-5 (192, 64, 256), in
#: our own kernels.
_TILELANG: dict[str, Any] = {
    "package": TILELANG,
    "capabilities": (HOPPER,),
    "dtypes": (torch.bfloat16,),
    "dims": ((192, 128), (256, 256)),
    "rope_dim": 64,
    "sink": False,
}


def _ours(name: str, **support: Any) -> Candidate:
    return Candidate("tilelang", f"{_HERE}.tilelang.launch:{name}", Support(**support, **_TILELANG))


def _torch(name: str) -> Candidate:
    support = Support(covers="any shape", sink=False)
    return Candidate("torch", f"{_HERE}.torch:{name}", support, fused=False)


KEY_BITS = Operation(
    "key_bits",
    "bits of listed keys",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton.bits:key_bits",
            Support(covers="one launch for any K", package=TRITON, **PORTABLE),
        ),
        Candidate("torch", f"{_HERE}.torch:key_bits", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:key_bits",
)

VISIBLE_BITS = Operation(
    "visible_bits",
    "bits of visible keys",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton.visible:visible_bits",
            Support(covers="one launch for any layout", package=TRITON, **PORTABLE),
        ),
        Candidate("torch", f"{_HERE}.torch:visible_bits", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:visible_bits",
)

FORWARD = Operation(
    "masked_attention_forward",
    "masked dense attention forward",
    (
        _ours("forward", covers="out, lse"),
        _torch("forward"),
    ),
    meta=f"{_HERE}.meta:forward",
)

BACKWARD = Operation(
    "masked_attention_backward",
    "masked dense attention backward",
    (
        _ours("backward", covers="dq, dkv, dk_pe", **ATOMIC_SUMS),
        _torch("backward"),
    ),
    meta=f"{_HERE}.meta:backward",
)

PROBABILITIES = Operation(
    "masked_attention_probabilities",
    "head sum of the probabilities of masked dense attention",
    (
        _ours("probabilities", covers="p_sum and its keys from q, kv, k_pe, lse"),
        _torch("probabilities"),
    ),
    meta=f"{_HERE}.meta:probabilities",
)
