"""Masked dense attention: the operations and what implements them."""

from __future__ import annotations

from megatron_dsa.dispatch import Candidate, Operation, Support
from megatron_dsa.dispatch.gpus import PORTABLE
from megatron_dsa.dispatch.packages import TRITON

_HERE = __package__

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

FORWARD = Operation(
    "masked_attention_forward",
    "masked dense attention forward",
    (
        Candidate(
            "torch",
            f"{_HERE}.torch:forward",
            Support(covers="any shape", sink=False),
            fused=False,
        ),
    ),
    meta=f"{_HERE}.meta:forward",
)

BACKWARD = Operation(
    "masked_attention_backward",
    "masked dense attention backward",
    (
        Candidate(
            "torch",
            f"{_HERE}.torch:backward",
            Support(covers="any shape", sink=False),
            fused=False,
        ),
    ),
    meta=f"{_HERE}.meta:backward",
)

PROBABILITIES = Operation(
    "masked_attention_probabilities",
    "head sum of the probabilities of masked dense attention",
    (
        Candidate(
            "torch",
            f"{_HERE}.torch:probabilities",
            Support(covers="any shape", sink=False),
            fused=False,
        ),
    ),
    meta=f"{_HERE}.meta:probabilities",
)
