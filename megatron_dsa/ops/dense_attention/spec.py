"""Dense attention: operation, implementations, fake kernel, reference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dsa.ops.dense_attention import flash2, flash4, torch_cudnn, torch_flash
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.packages import FLASH_ATTENTION_4
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS, HALF
from megatron_dsa.ops.meta import empty_sums, take_workspace

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
        # FlashAttention 4 is last because it is beta, although its forward is fastest on Hopper.
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
    fake=f"{_HERE}.spec:fake",
)


@dataclass(frozen=True)
class BlockAttention:
    """Attention to one block of keys and values by the candidate ``name``.

    ``forward(q, k, v, causal, scale, sequences) -> out, lse``; ``backward(dout, q, k, v, out, lse,
    causal, scale, sequences) -> dq, dk, dv``, with ``out`` and ``lse`` over all blocks. Queries
    without keys give 0 and ``-inf``.
    """

    name: str
    forward: Callable
    backward: Callable


def fake(candidate: Candidate, attention: Callable, workspace_bytes: int, *args, **options):
    workspace_bytes = 0 if candidate.fused else workspace_bytes

    def forward(q, k, v, causal, scale, sequences):
        take_workspace(q, workspace_bytes)
        return q.new_empty(*q.shape[:2], v.shape[2]), empty_sums(q, *q.shape[:2])

    def backward(dout, q, k, v, *_):
        take_workspace(q, workspace_bytes)
        wide = empty_sums(q, *q.shape)  # kernels sum dq in fp32
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        del wide
        return gradients

    return attention(*args, block=BlockAttention(candidate.name, forward, backward), **options)


def reference(q, k, v, visible, softmax_scale) -> torch.Tensor:
    logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    logits = logits.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(dim=-1)
    p = torch.softmax(logits.masked_fill(empty[:, None], 0.0), dim=-1)
    return torch.einsum("hqk,khd->qhd", p.masked_fill(empty[:, None], 0.0), v)
