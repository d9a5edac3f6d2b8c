"""The indexer's losses: the operations and what implements them."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import CUDNN, TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS

_HERE = __package__
_BF16 = (torch.bfloat16,)
_INDEXER: dict[str, Any] = {"dims": ((128, 0),), "heads": (1, 64)}

SPARSE_LOSS = Operation(
    "sparse_indexer_loss",
    "indexer loss over the selected keys",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:sparse",
            Support(
                covers="value and gradients in one kernel",
                package=TILELANG,
                capabilities=(HOPPER,),
                **_INDEXER,
                dtypes=_BF16,
                topk=(1, 2048),
                without_relu=False,
                **ATOMIC_SUMS,
            ),
        ),
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:sparse",
            Support(
                covers="value and gradients",
                package=CUDNN,
                capabilities=(HOPPER,),
                **_INDEXER,
                dtypes=_BF16,
                without_relu=False,
                deterministic=False,
                bridged="heads padded to 8, 16, 32 or 64, K in buckets; teacher copied; "
                "underflowed students kept",
            ),
        ),
        Candidate(
            "torch",
            f"{_HERE}.torch:sparse",
            Support(covers="any shape; gradients along with the value", **ATOMIC_SUMS),
            fused=False,
        ),
    ),
    meta=f"{_HERE}.meta:sparse",
)

DENSE_LOSS = Operation(
    "dense_indexer_loss",
    "indexer loss over all visible keys",
    (
        Candidate(
            "cudnn",
            "declined",
            Support(
                covers="value and gradients",
                package=CUDNN,
                declined="cuDNN's needs S x S fp32 scores",
            ),
        ),
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.dense:dense",
            Support(
                covers="teachers of plain MLA; the rest as triton",
                package=TILELANG,
                capabilities=(HOPPER,),
                dtypes=_BF16,
                teacher_dims=(192, 256),
                **_INDEXER,
            ),
        ),
        Candidate(
            "triton",
            f"{_HERE}.triton.dense:dense",
            Support(
                covers="value and gradients; teachers of any head dim",
                package=TRITON,
                **PORTABLE,
                dtypes=_BF16,
                **_INDEXER,
            ),
        ),
        Candidate("torch", f"{_HERE}.torch_dense:dense", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:dense",
)
