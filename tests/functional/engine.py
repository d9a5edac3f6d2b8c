"""Runs with transformer-engine's layers beside runs with Megatron's own: models, flags, bounds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron_dsa.versions import why_not_transformer_engine
from tests.functional.launch import TINY, Run, train

#: Marks of a test file whose runs need transformer-engine.
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        why_not_transformer_engine(torch.cuda.is_available()) is not None,
        reason=str(why_not_transformer_engine(torch.cuda.is_available())),
    ),
]
#: TE loads the scaling factors of delayed scaling, which are pickled, only with this variable.
ALLOW_PICKLE = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}

LOCAL = {
    "--transformer-impl": "local",
    "--no-gradient-accumulation-fusion": True,
    "--no-persist-layer-norm": True,
    "--no-masked-softmax-fusion": True,
    "--moe-grouped-gemm": None,  # one expert after the other
}
#: Gradients are rounded to bf16 as with local layers; fused accumulation has a test of its own.
ENGINE = {"--transformer-impl": "transformer_engine", "--no-gradient-accumulation-fusion": True}
#: Flags of each precision, beside ``--bf16``.
PRECISIONS = {
    "bf16": {},
    "tensorwise": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "delayed": {
        "--fp8-format": "hybrid",
        "--fp8-recipe": "delayed",
        "--fp8-amax-history-len": 16,
        "--fp8-amax-compute-algo": "max",
    },
    "blockwise": {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"},
}
FP8 = ("tensorwise", "delayed", "blockwise")

#: Head dims of V3.2, so that the fused kernels run, and a batch of one sequence.
DSA = TINY | {
    "--bf16": True,
    "--num-layers": 4,
    "--hidden-size": 1024,
    "--ffn-hidden-size": 2048,
    "--num-attention-heads": 16,
    "--q-lora-rank": 512,
    "--kv-lora-rank": 512,
    "--qk-head-dim": 128,
    "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 128,
    "--dsa-selected-attention": "sparse",  # absorption, at any length
    "--dsa-indexer-n-heads": 16,
    "--dsa-indexer-head-dim": 128,
    "--dsa-indexer-topk": 512,
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--micro-batch-size": 1,
    "--global-batch-size": 1,
    "--init-method-std": 0.02,
    "--lr": 1e-3,
    "--min-lr": 1e-3,
    "--clip-grad": 1.0,
    "--train-iters": 7,
}
EXPERTS = DSA | {
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 512,
    "--moe-layer-freq": "[0,1,1,1]",
    "--moe-grouped-gemm": True,
}
MTP = DSA | {"--mtp-num-layers": 1}
V4 = DSA | {
    "--csa-compress-ratios": [0, 4, 128, 4],
    "--csa-window-size": 128,
    "--csa-compress-rotary-base": 160000,
    "--kv-lora-rank": 448,
    "--qk-head-dim": 448,
    "--v-head-dim": 512,
    "--o-groups": 4,
    "--o-lora-rank": 256,
    "--dsa-selected-attention": None,
    "--dsa-indexer-rope-interleaved": True,
}
MODELS = {"DSA": DSA, "experts": EXPERTS, "V4": V4, "MTP": MTP}


@dataclass(frozen=True)
class Bounds:
    """Largest relative difference of the lm loss from that of local layers.

    Attributes:
        first: at step 1.
        later: at steps 3 to 7. From step 8 on, runs that should be equal differ as much.
    """

    first: float
    later: float


#: About twice what was measured on an H200 with TE 2.20.2, by model and precision.
BOUNDS = {
    ("DSA", "bf16"): Bounds(2e-5, 3e-5),
    ("DSA", "tensorwise"): Bounds(2e-5, 1e-2),
    ("DSA", "delayed"): Bounds(6e-5, 1.6e-2),
    ("DSA", "blockwise"): Bounds(1.2e-3, 8e-3),
    ("experts", "bf16"): Bounds(2e-5, 1.2e-3),
    ("experts", "tensorwise"): Bounds(4e-4, 1e-2),
    ("experts", "delayed"): Bounds(1.6e-3, 0.22),
    ("experts", "blockwise"): Bounds(6e-4, 6e-2),
    ("V4", "bf16"): Bounds(1e-5, 4e-4),
    ("V4", "tensorwise"): Bounds(1.6e-3, 6e-2),
    # Measured: 1.1 in later steps, which is more than any other recipe and not explained.
    ("V4", "delayed"): Bounds(4e-4, 6e-2),
    ("V4", "blockwise"): Bounds(8e-4, 4e-2),
    ("MTP", "bf16"): Bounds(1e-5, 2e-4),
    ("MTP", "tensorwise"): Bounds(1.4e-3, 1e-2),
    ("MTP", "delayed"): Bounds(1.4e-3, 8e-2),
    ("MTP", "blockwise"): Bounds(2e-5, 1e-2),
}
#: Relative error of a gradient of the first step in bf16, against local layers: of the indexers
#: (whose relu makes gradients jump where scores round differently), and of all others.
INDEXER_GRADIENT, GRADIENT = 0.1, 2e-2


def run(flags: dict, layers: dict, precision: str = "bf16", **settings) -> Run:
    """Train with a set of layers, in a precision, in the process that all these runs share."""
    return train(flags | layers | PRECISIONS[precision], one_process=True, **settings)


def relative_differences(got: list[float], expected: list[float]) -> list[float]:
    """Return ``|got - expected| / |expected|`` by step."""
    return [abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True)]


def check_losses(got: Run, expected: Run, bounds: Bounds) -> None:
    """Check the lm loss of every step but the second.

    For the second, Megatron logs the mean of the first two losses after a start.
    """
    found = relative_differences(got.column("lm loss"), expected.column("lm loss"))
    print("differences by step:", " ".join(f"{x:.1e}" for x in found))
    assert len(found) >= 3
    # Written so that NaN is a difference.
    assert found[0] <= bounds.first, found
    assert all(x <= bounds.later for x in found[2:]), found
