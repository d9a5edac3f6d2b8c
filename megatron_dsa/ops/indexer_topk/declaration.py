"""The lightning indexer: the operations of a selection and what implements them."""

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import HOPPER
from megatron_dsa.ops.dispatch.packages import CUDNN, TILELANG
from megatron_dsa.ops.dispatch.support import HALF

_HERE = __package__

SCORES = Operation(
    "indexer_scores",
    "index scores of a block of queries",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:Scores",
            Support(
                covers="scores of a block of queries, where they are seen; with and without relu",
                package=TILELANG,
                capabilities=(HOPPER,),
                dims=((128, 0),),
                heads=(1, 64),
                dtypes=(torch.bfloat16,),
                bridged="heads padded to 16, 32 or 64",
            ),
        ),
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:Scores",
            Support(
                covers="scores of a block of queries",
                package=CUDNN,
                capabilities=(HOPPER,),
                dtypes=(torch.bfloat16,),
                dims=((128, 0),),
                heads=(1, 64),
                without_relu=False,
                bridged="S x S buffer avoided block by block; heads padded to 16, 32 or 64; "
                "ratio 1",
            ),
        ),
        Candidate("torch", f"{_HERE}.torch:Scores", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:scores",
)

ENGINE_SCORES = Operation(
    "indexer_engine_scores",
    "index scores of a block of queries in the fp8 arithmetic of inference engines",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:EngineScores",
            Support(
                covers="fp8 scores of a block of queries, where they are seen, in DeepGEMM's order",
                package=TILELANG,
                capabilities=(HOPPER,),
                dims=((128, 0),),
                heads=(1, 64),
                dtypes=(torch.float8_e4m3fn,),
                without_relu=False,
                bridged="heads padded to 16, 32 or 64",
            ),
        ),
        Candidate("torch", f"{_HERE}.engine:Scores", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:scores",
)

TOPK = Operation(
    "indexer_topk",
    "the best visible keys of a block of scores",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:Selection",
            Support(
                covers="selection from a block of scores, read once",
                package=TILELANG,
                capabilities=(HOPPER,),
                topk=(1, 4096),
                dtypes=(*HALF, torch.float32),
            ),
        ),
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:Selection",
            Support(
                covers="selection from a block of scores",
                package=CUDNN,
                minimum="1.32",
                capabilities=(HOPPER,),
                topk=(1, 2048),
                dtypes=(torch.bfloat16,),
                packed=False,
                bridged="-0 and +0 made equal; ties to the smallest slot",
            ),
        ),
        Candidate("torch", f"{_HERE}.torch:Selection", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:select",
)
