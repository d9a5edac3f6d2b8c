"""Lightning indexer: inputs, candidates, fake kernels, reference (DeepSeek-V3.2, eq. 1, 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.checks import FLOATS, require_layout, require_tensor
from megatron_dsa.ops.dispatch import Candidate, OpCall, Operation, Support, describe_call
from megatron_dsa.ops.dispatch.gpus import HOPPER
from megatron_dsa.ops.dispatch.packages import CUDNN, TILELANG
from megatron_dsa.ops.dispatch.support import HALF
from megatron_dsa.ops.layout.layout import Block, Layout, Seen
from megatron_dsa.ops.meta import empty_sums, take_workspace

_HERE = __package__
_HOPPER: dict[str, Any] = {"capabilities": (HOPPER,), "dims": ((128, 0),), "heads": (1, 64)}


@dataclass(frozen=True)
class IndexerInputs:
    """Inputs from which index scores are computed.

    Attributes:
        q: ``[Sq, HI, DI]``.
        k: ``[Skv, DI]``, shared by all index heads.
        weights: ``[Sq, HI]``, including ``HI^-1/2 * DI^-1/2``.
        relu: clamp each head's product at 0, as DeepSeek does.
        key_scales: fp32 ``[Skv]``, if q and k are fp8 (e4m3); ``weights`` include the scales of q.
        fp32_weights: fp32 ``[Sq, HI]`` for engine scores, by default ``weights``.
        checked: :func:`.api.require_finite_scores` accepted the inputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    key_scales: torch.Tensor | None = None
    fp32_weights: torch.Tensor | None = None
    checked: bool = False

    def detach(self) -> IndexerInputs:
        return self.with_tensors([x.detach() for x in self.tensors()])

    def with_queries(self) -> IndexerInputs:
        return self

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.weights

    def with_tensors(self, tensors: Sequence[Any]) -> IndexerInputs:
        q, k, weights = tensors
        return replace(self, q=q, k=k, weights=weights)


class BlockScores(Protocol):
    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        """Return temporary bytes per score, including the score's ``itemsize`` bytes."""

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        """Return the scores ``[tokens, width]`` of the block's queries, fp32 (fp64).

        ``keys`` are in slot order. Scores of invisible keys are undefined and may be NaN. The
        caller may overwrite the result.
        """


class BlockSelection(Protocol):
    """Implementation of ``indexer_topk``.

    If the attribute ``takes_out`` is true, a fourth argument may receive the result.
    """

    def bytes_per_score(self) -> int:
        """Return temporary bytes per score, excluding the score itself."""

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        """Return int32 ``[tokens, topk]``: ascending columns of the best visible scores, then -1.

        ``scores [tokens, width]``, with ``width > topk``, are undefined outside ``seen`` and may be
        overwritten. Ties go to the smallest column; ``-0 == +0``.
        """


def describe_index_call(inputs: IndexerInputs, layout: Layout, topk: int | None) -> OpCall:
    dtype = inputs.q.dtype
    if inputs.key_scales is None:  # fp8 queries have fp32 weights and stay fp8
        dtype = torch.promote_types(dtype, inputs.weights.dtype)
    return describe_call(
        inputs.q.device,
        dtype=dtype,
        heads=inputs.q.shape[1],
        qk_dim=inputs.q.shape[2],
        v_dim=0,
        topk=topk,
        packed=layout.real is not None,
        relu=inputs.relu,
    )


def check_indexer(inputs: IndexerInputs, layout: Layout, **queries: torch.Tensor) -> None:
    q, k, weights = inputs.q, inputs.k, inputs.weights
    fix = "flatten sequence and batch to tokens"
    require_tensor("inputs.q", q, ("Sq", "HI", "DI"), FLOATS, fix=fix)
    require_tensor("inputs.k", k, ("Skv", q.shape[2]), (q.dtype,), q, "give it the DI of inputs.q")
    fix = "give one weight per query token and index head"
    require_tensor("inputs.weights", weights, tuple(q.shape[:2]), FLOATS, q, fix)
    require(inputs.key_scales is None, "inputs.key_scales must be None: they belong to fp8 keys")
    if inputs.fp32_weights is not None:
        fix = "make them with ops.indexer_topk.engine.fp32_weights"
        dtypes = (torch.float32,)
        require_tensor(
            "inputs.fp32_weights", inputs.fp32_weights, tuple(q.shape[:2]), dtypes, q, fix
        )
    require_layout(layout, {"inputs.q": q} | queries, {"inputs.k": k})


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
                **_HOPPER,
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
                **_HOPPER,
                dtypes=(torch.bfloat16,),
                without_relu=False,
                bridged="S x S buffer avoided block by block; heads padded to 16, 32 or 64; "
                "ratio 1",
            ),
        ),
        Candidate("torch", f"{_HERE}.torch:Scores", Support(covers="any shape"), fused=False),
    ),
    fake=f"{_HERE}.spec:fake_scores",
)

ENGINE_SCORES = Operation(
    "indexer_engine_scores",
    "index scores of a block of queries in the fp8 arithmetic of inference engines",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:Scores",
            Support(
                covers="fp8 scores of a block of queries, where they are seen, in DeepGEMM's order",
                package=TILELANG,
                **_HOPPER,
                dtypes=(torch.float8_e4m3fn,),
                without_relu=False,
                bridged="heads padded to 16, 32 or 64",
            ),
        ),
        Candidate("torch", f"{_HERE}.engine:Scores", Support(covers="any shape"), fused=False),
    ),
    fake=f"{_HERE}.spec:fake_scores",
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
    fake=f"{_HERE}.spec:fake_selection",
)


def fake_scores(
    _candidate: Candidate, inputs: IndexerInputs, block: Block, _keys: torch.Tensor, _seen: Seen
) -> torch.Tensor:
    return empty_sums(inputs.weights, inputs.q[block.tokens].shape[0], block.width)


def fake_selection(
    candidate: Candidate,
    scores: torch.Tensor,
    _seen: Seen,
    topk: int,
    _out: torch.Tensor | None = None,
) -> torch.Tensor:
    selection: Any = candidate.load()
    take_workspace(scores, scores.numel() * selection.bytes_per_score())
    return scores.new_empty(scores.shape[0], topk, dtype=torch.int32)


def index_scores(q, k, weights, relu=True) -> torch.Tensor:
    products = torch.einsum("qhd,kd->qhk", q, k)
    return torch.einsum("qh,qhk->qk", weights, products.relu() if relu else products)


def selected_ids(scores, visible, k) -> torch.Tensor:
    lists = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        ids = sorted((i for i, ok in enumerate(seen) if ok), key=lambda i: (-row[i], i))[:k]
        lists.append(sorted(ids) + [-1] * (k - len(ids)))
    return torch.tensor(lists, dtype=torch.int32, device=scores.device)


def engine_scores(q, k, weights) -> torch.Tensor:
    """Return the scores that :mod:`.engine` defines, in float64 and without torch's fp8."""
    (q, q_scale), (k, k_scale) = _engine_quantized(q), _engine_quantized(k)
    weights = (weights.float().double() * q_scale).float().double()
    sums = [weights.new_zeros(len(q), len(k)) for _ in range(8)]
    heads = list(range(q.shape[1]))
    for head in heads[8:16] + heads[:8] + heads[16:]:
        products = (q[:, head] @ k.T).float().double().clamp_min(0)
        # Product and sum are exact in float64, so the fused result rounds once.
        fused = sums[head % 8] + weights[:, head, None] * products
        sums[head % 8] = fused.float().double()
    while len(sums) > 1:
        sums = [(a + b).float().double() for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return (sums[0] * k_scale).float()


def _engine_quantized(x) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.bfloat16().double()
    largest = x.abs().amax(-1).clamp_min(float(torch.tensor(1e-4)))
    ratio = (largest.float() * (1 / 448)).double()
    mantissa = torch.frexp(ratio).mantissa
    scale = torch.where(mantissa == 0.5, ratio, ratio / mantissa)
    x = x / scale[..., None]
    power = torch.where(x == 0, 0, x / torch.frexp(x).mantissa)
    unit = (power / 16).clamp_min(2.0**-9)  # e4m3: three mantissa bits, subnormal below 2^-6
    return (x / unit).round() * unit, scale
