"""Sparse attention: the operations and what implements them."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, First, OpCall, Operation, Policy, Support
from megatron_dsa.ops.dispatch.gpus import BLACKWELL, HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import CUDNN, FLASH_MLA, TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS, HALF
from megatron_dsa.ops.sparse_attention import flashmla

_HERE = __package__
#: Absorbed MLA of V3.2 (512 latent dims, 64 of rope), and DeepSeek-V4.
_LATENT = ((576, 512), (512, 512))
#: A tile holds several queries.
_FEW_HEADS = First("tilelang", heads=(1, 32))
_TILELANG: dict[str, Any] = {
    "package": TILELANG,
    **PORTABLE,
    "dtypes": (torch.bfloat16,),
    "dims": _LATENT,
    "heads": (1, 128),
}

FORWARD = Operation(
    "sparse_attention_forward",
    "sparse attention forward",
    (
        Candidate(
            "flashmla",
            f"{_HERE}.flashmla:forward",
            Support(
                covers="out, lse",
                package=FLASH_MLA,
                capabilities=(HOPPER, BLACKWELL),
                dtypes=(torch.bfloat16,),
                dims=_LATENT,
                heads=(1, 128),
                head_sizes=flashmla.HEADS,
                bridged="heads padded to 64 or 128, K to 128; lengths clamped; lse of empty rows",
                probe=flashmla.probe,
            ),
        ),
        Candidate(
            "tilelang", f"{_HERE}.tilelang.launch:forward", Support(covers="out, lse", **_TILELANG)
        ),
        Candidate(
            "torch",
            f"{_HERE}.torch:forward",
            Support(covers="any shape; p_sum", gives_teacher=True),
            fused=False,
        ),
    ),
    first=(_FEW_HEADS,),
    meta=f"{_HERE}.meta:forward",
)

BACKWARD = Operation(
    "sparse_attention_backward",
    "sparse attention backward",
    (
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:backward",
            Support(
                covers="dq, dkv, dsink",
                package=CUDNN,
                dims=_LATENT,
                capabilities=(HOPPER, BLACKWELL),
                dtypes=HALF,
                heads=(2, 128),
                deterministic=False,
                bridged="K in buckets; fp32 dkv from the workspace (Hopper, from 1.32; else "
                "rounded)",
            ),
        ),
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:backward",
            Support(
                covers="dq, dkv, dsink, p_sum",
                **_TILELANG,
                gives_teacher=True,
                adds_keys=True,
                **ATOMIC_SUMS,
            ),
        ),
        Candidate(
            "torch",
            f"{_HERE}.torch:backward",
            Support(covers="any shape; p_sum", gives_teacher=True, **ATOMIC_SUMS),
            fused=False,
        ),
    ),
    # Others need an operation of its own for the teacher.
    first=(_FEW_HEADS, First("tilelang", heads=(1, 128), teacher=True)),
    meta=f"{_HERE}.meta:backward",
)

PROBABILITIES = Operation(
    "sparse_attention_probabilities",
    "head sum of the probabilities (teacher)",
    (
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:probabilities",
            Support(
                covers="p_sum from q, kv, lse",
                package=CUDNN,
                dims=_LATENT,
                capabilities=(HOPPER,),
                dtypes=(torch.bfloat16,),
                heads=(1, 128),
                bridged="heads padded to 8, 16, 32 or 64, K in buckets; row normalisation undone",
            ),
        ),
        Candidate(
            "triton",
            f"{_HERE}.triton:probabilities",
            Support(
                covers="p_sum from q, kv, lse",
                package=TRITON,
                **PORTABLE,
                dtypes=(*HALF, torch.float32),
            ),
        ),
        Candidate(
            "torch", f"{_HERE}.torch:probabilities", Support(covers="any shape"), fused=False
        ),
    ),
    meta=f"{_HERE}.meta:probabilities",
)


def gives_teacher(operation: Operation, call: OpCall, policy: Policy) -> bool:
    """Whether attention returns the teacher; else ``sparse_attention_probabilities`` forms it.

    Tilings that were never run leave it out in deterministic mode.

    Args:
        operation: forward or backward.
        call: the description of its call.
        policy: which implementations may run.
    """
    choice = operation.choose(call, policy)
    if call.deterministic and choice.never_run:
        return False
    return choice.candidate.support.gives_teacher
