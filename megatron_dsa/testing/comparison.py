"""Comparison with float64: relative errors, violated rules, tolerances."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

#: Tolerances at model shapes; bf16 kernels reach 3e-3.
MODEL_SHAPES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
#: Tolerances at small shapes, whose sums are short.
SPARSE_ATTENTION = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 5e-3}
#: Tolerances of losses at small shapes.
INDEXER_LOSS = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
    torch.float16: 5e-3,
}
#: Tolerances of results that are fp32 even for 16-bit inputs.
FP32_RESULTS = {"lse": 1e-4, "p_sum": 1e-3, "loss": 1e-3}
#: Measured: with 131072 keys, fp8 inverts scores by up to 6.4e-3 of the largest.
SCORE_INVERSION = 1e-2
#: Minimum recall of the float64 selection.
LEAST_RECALL = 0.99
#: Minimum recall with engine numerics, lower than 1 because tensor cores keep fewer bits.
LEAST_ENGINE_SHARE = 0.998
#: Tolerance of scores with engine numerics.
ENGINE_SCORES = 5e-3
#: Float64 results with a lower root mean square are rounding errors.
ROUNDING = 1e-14


def by_figure(tolerance: float) -> dict[str, float]:
    smaller = {figure: limit for figure, limit in FP32_RESULTS.items() if limit < tolerance}
    return smaller | {"score inversion": SCORE_INVERSION, "engine scores": ENGINE_SCORES}


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``norm(x - expected) / norm(expected)`` in float64; NaN if ``x`` contains NaN.

    If ``expected`` is only rounding error, return the root mean square of the difference.
    """
    expected = expected.detach().double()
    norm, size = expected.norm(), max(expected.numel(), 1) ** 0.5
    difference = (x.detach().double() - expected).norm()
    return float(difference / torch.where(norm > ROUNDING * size, norm, size))


@dataclass
class Comparison:
    """Errors and complaints about results of one implementation.

    Attributes:
        tolerance: largest relative error.
        tolerances: exceptions from ``tolerance`` by figure.
        errors: figure -> worst relative error against float64.
        complaints: descriptions of violated rules.
    """

    tolerance: float
    tolerances: Mapping[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def require(self, rule: bool | torch.Tensor, complaint: str) -> bool:
        """Add ``complaint`` unless ``rule`` holds; return ``rule``."""
        holds = bool(rule)
        if not holds and complaint not in self.complaints:
            self.complaints.append(complaint)
        return holds

    def compare(self, figure: str, got, expected: torch.Tensor) -> None:
        """Record the relative error of ``got``, or a complaint if its shape differs."""
        if not self.require(got is not None, f"{figure} is missing"):
            return
        shape, wanted = tuple(got.shape), tuple(expected.shape)
        if not self.require(shape == wanted, f"{figure} has shape {shape}, not {wanted}"):
            return
        self.keep_worst(figure, relative_error(got, expected))

    def keep_worst(self, figure: str, error: float) -> None:
        known = self.errors.get(figure)
        # NaN is worst, and all comparisons with it are false.
        if known is None or (known == known and not error <= known):
            self.errors[figure] = error

    @property
    def worst_error(self) -> float:
        return max((e if math.isfinite(e) else math.inf for e in self.errors.values()), default=0.0)

    def compare_forward(self, out, lse, expected_out, expected_lse, empty, dtype) -> None:
        """Compare attention with float64; tokens marked ``empty`` have no keys."""
        self.compare("out", out, expected_out)
        self.require(out.dtype == dtype, f"out is {out.dtype}, not {dtype}")
        self.require((out[empty] == 0).all(), "out of a query without keys is not 0")
        self.require((lse[empty] == float("-inf")).all(), "lse without keys is not -inf")
        self.compare("lse", lse[~empty], expected_lse[~empty])

    def wrong(self) -> list[str]:
        far = [
            f"{figure} {error:.1e}" if error == error else f"{figure} not finite"
            for figure, error in self.errors.items()
            if not error <= self.tolerances.get(figure, self.tolerance)
        ]
        return far + self.complaints


def comparison_at_model_shapes(dtype: torch.dtype) -> Comparison:
    tolerance = MODEL_SHAPES[dtype]
    return Comparison(tolerance, by_figure(tolerance))
