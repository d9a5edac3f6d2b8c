"""Sparse attention: inputs, implementations, reference (DeepSeek-V3.2, eq. 3)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, First, OpCall, Operation, Policy, Support
from megatron_dsa.ops.dispatch.gpus import BLACKWELL, HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import CUDNN, FLASH_MLA, TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS, HALF
from megatron_dsa.ops.sparse_attention import flashmla


class KeyGradientAccumulator:
    """Key gradient, summed over backward calls that each process some queries.

    Backward kernels with atomics add to :meth:`buffer`; callers pass other kernels' ``dkv`` to
    :meth:`add`.

    Args:
        query_heads: number of query tokens times heads in all calls.
        bounds: returns upper bounds (fp32 scalars) of ``|q|`` and ``|dout|`` in all calls, for
            fixed-point sums.
    """

    def __init__(self, query_heads: int, bounds: Callable[[], tuple[torch.Tensor, torch.Tensor]]):
        self.query_heads, self.bounds = query_heads, bounds
        self._buffer: Any = None
        self._finish: Callable[[Any], torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None

    def buffer(self, make: Callable[[], Any], finish: Callable[[Any], torch.Tensor]) -> Any:
        """Return one buffer, which the first call makes and ``finish`` converts to fp32."""
        if self._finish is None:
            self._buffer, self._finish = make(), finish
        return self._buffer

    def add(self, dkv: torch.Tensor | None) -> None:
        if dkv is not None:
            self._sum = dkv if self._sum is None else self._sum.add_(dkv)

    def result(self) -> torch.Tensor:
        if self._finish is not None:
            self.add(self._finish(self._buffer))
            self._buffer = None
        assert self._sum is not None
        return self._sum


@dataclass(frozen=True)
class SparseAttentionInputs:
    """Inputs of every sparse attention implementation.

    Attributes:
        want_p_sum: also return ``p_sum`` if that costs nothing.
        length_in_range: ``topk_length`` is within ``[0, K]``.
        key_sum: accumulator for backward kernels that return ``None`` as ``dkv``.
        padded_q: contiguous ``[Sq, padded H, D]``: ``q``, then finite padding heads; see
            ``Support.head_sizes``.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    v_dim: int
    softmax_scale: float
    topk_length: torch.Tensor | None
    sink: torch.Tensor | None
    workspace_bytes: int
    want_p_sum: bool = False
    in_order: bool = False
    length_in_range: bool = False
    key_sum: KeyGradientAccumulator | None = None
    padded_q: torch.Tensor | None = None


_HERE = __package__
#: Dims of keys and values: absorbed MLA of DeepSeek-V3.2, then DeepSeek-V4.
_LATENT = ((576, 512), (512, 512))
#: TileLang tiles with few heads hold several queries.
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
    fake=f"{_HERE}.meta:forward",
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
    # cuDNN's backward needs a separate operation for the teacher.
    first=(_FEW_HEADS, First("tilelang", heads=(1, 128), teacher=True)),
    fake=f"{_HERE}.meta:backward",
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
    fake=f"{_HERE}.meta:probabilities",
)


def gives_teacher(operation: Operation, call: OpCall, policy: Policy) -> bool:
    choice = operation.choose(call, policy)
    if call.deterministic and choice.never_run:
        return False
    return choice.candidate.support.gives_teacher


def reference(
    q, kv, indices, *, v_dim, softmax_scale, topk_length=None, sink=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    valid = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        valid &= torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
    table = torch.cat([kv, kv.new_zeros(1, kv.shape[1])])
    keys = table[torch.where(valid, indices, kv.shape[0]).long()]
    logits = torch.einsum("qhd,qkd->qhk", q, keys) * softmax_scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    # Probabilities of queries without keys are 0 instead of 0/0.
    safe = torch.where(total == float("-inf"), 0.0, total)
    p = torch.exp(logits - safe[..., None])
    return torch.einsum("qhk,qkd->qhd", p, keys[..., :v_dim]), lse, p.sum(1)
