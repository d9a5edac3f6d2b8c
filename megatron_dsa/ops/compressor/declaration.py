"""The compressor: the operation and what implements it."""

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF

_HERE = __package__

COMPRESSOR = Operation(
    "compressor",
    "pooling of positions, forward and backward",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton.launch:compress",
            Support(
                covers="pooled keys; values, scores, ape",
                package=TRITON,
                **PORTABLE,
                dtypes=(*HALF, torch.float32),
            ),
        ),
        Candidate("torch", f"{_HERE}.torch:compress", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:compress",
)
