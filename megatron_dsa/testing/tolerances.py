"""Largest relative errors against float64 that pass."""

import torch

#: Results and gradients at the shapes of models: of the doctor and the benchmarks. Kernels in bf16
#: land at 3e-3 and below (``rel_error`` in the CSVs of ``benchmarks/``).
MODEL_SHAPES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
#: Sparse attention at the small shapes of the tests, whose sums are short.
SPARSE_ATTENTION = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 5e-3}
#: The indexer's losses and their gradients, likewise.
INDEXER_LOSS = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
    torch.float16: 5e-3,
}
#: Results that are fp32 for inputs in bf16 and fp16, too, by figure.
FP32_RESULTS = {"lse": 1e-4, "p_sum": 1e-3, "loss": 1e-3}
#: Limit for :meth:`~megatron_dsa.testing.indexer_topk.SelectionCase.compare`. Among 131072
#: keys, fp8 candidates miss keys up to 6.4e-3 of the largest score.
SCORE_INVERSION = 1e-2
#: Least share of the float64 selection that a selection from fp32 scores must hold.
LEAST_RECALL = 0.99
#: Least share of the keys that the rule of :mod:`megatron_dsa.ops.indexer_topk.engine` selects, and
#: largest error of its scores: tensor cores keep fewer bits of the products.
LEAST_ENGINE_SHARE = 0.998
ENGINE_SCORES = 5e-3


def by_figure(tolerance: float) -> dict[str, float]:
    """Return the tolerances of figures that have another one than ``tolerance``."""
    smaller = {figure: limit for figure, limit in FP32_RESULTS.items() if limit < tolerance}
    return smaller | {"score inversion": SCORE_INVERSION, "engine scores": ENGINE_SCORES}
