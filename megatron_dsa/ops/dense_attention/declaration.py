"""Dense attention: the operation and what implements it."""

from megatron_dsa.ops.dense_attention import flash2, flash4, torch_cudnn, torch_flash
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.packages import FLASH_ATTENTION_4
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS, HALF

_HERE = __package__

DENSE_ATTENTION = Operation(
    "dense_attention",
    "dense causal attention, forward and backward",
    (
        Candidate(
            "torch-cudnn",
            f"{_HERE}.blocks:with_torch_cudnn",
            Support(
                covers="torch's cuDNN kernels, sm80 and later; head dims that are multiples of 8 "
                "up to 128; from cuDNN 9.10 up to 256 on sm90, from 9.11 192/128 on sm100",
                dtypes=HALF,
                packed=False,
                deterministic=False,
                probe=torch_cudnn.reason,
            ),
        ),
        Candidate(
            "flash2",
            f"{_HERE}.blocks:with_flash2",
            Support(
                covers="FlashAttention 2.7 and later (package flash-attn), compute capability 8 "
                "and 9; head dims that are multiples of 8 up to 256; narrower values are padded",
                dtypes=HALF,
                probe=flash2.reason,
                **ATOMIC_SUMS,
            ),
        ),
        Candidate(
            "torch-flash",
            f"{_HERE}.blocks:with_torch_flash",
            Support(
                covers="torch's flash kernels, sm80 and later; head dims that are multiples of 8 "
                "up to 256; narrower values are padded",
                dtypes=HALF,
                probe=torch_flash.reason,
                **ATOMIC_SUMS,
            ),
        ),
        # Behind all others, though its forward is the fastest on Hopper: a beta that changes.
        Candidate(
            "flash4",
            f"{_HERE}.blocks:with_flash4",
            Support(
                covers="FlashAttention 4 (package flash-attn-4), values narrower than keys without "
                "padding",
                package=FLASH_ATTENTION_4,
                capabilities=((9, 0), (10, 0)),
                not_run=((10, 0),),
                dtypes=HALF,
                dims=((192, 128), (256, 256), (128, 128)),
                probe=flash4.reason,
                **ATOMIC_SUMS,
            ),
        ),
        Candidate("torch", f"{_HERE}.blocks:with_torch", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:attend",
)
