"""Norm and rope: the operations and what implements them."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF

_HERE = __package__
_TRITON: dict[str, Any] = {"package": TRITON, **PORTABLE, "dtypes": (*HALF, torch.float32)}

NORM_ROPE = Operation(
    "norm_rope",
    "norm and rope of queries, forward and backward",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton:norm_rope",
            Support(covers="in place; q", **_TRITON),
        ),
        Candidate("torch", f"{_HERE}.torch:norm_rope", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:norm_rope",
)

ROTATE = Operation(
    "rotate",
    "rope, or inverse rope, forward and backward",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton:rotate",
            Support(covers="any rotated dims", **_TRITON),
        ),
        Candidate("torch", f"{_HERE}.torch:rotate", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:rotate",
)

INDEX_ROTATION = Operation(
    "index_rotation",
    "rope and Hadamard transform of index queries and keys, forward and backward",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton_index:rotate_index",
            Support(
                covers="first or last dims, either pairing",
                **_TRITON,
                dims=tuple((dim, 0) for dim in (16, 32, 64, 128)),
            ),
        ),
        Candidate(
            "torch", f"{_HERE}.torch_index:rotate_index", Support(covers="any shape"), fused=False
        ),
    ),
    meta=f"{_HERE}.meta:rotate_index",
)
