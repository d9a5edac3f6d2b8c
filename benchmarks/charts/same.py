"""Charts of one training in several ways, one of them twice to show the noise.

``selected``: two attentions to selected keys. ``whole-v4``: a whole DeepSeek-V4 with fused kernels
and in torch.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save

COLOURS = ("#0072b2", "#d55e00", "#56b4e9")


@dataclass(frozen=True)
class Comparison:
    """One kind of training and its ways, compared with the first."""

    kind: str
    labels: dict[str, str]
    title: str
    file: str


COMPARISONS = (
    Comparison(
        "selected",
        {"sparse": "sparse attention", "masked": "masked dense attention",
         "sparse again": "sparse attention, another run"},
        "The same training with two attentions to selected keys",
        "train_selected.png",
    ),
    Comparison(
        "whole-v4",
        {"fused": "fused kernels", "unfused": "torch", "fused again": "fused kernels, another run"},
        "The same training of a whole DeepSeek-V4",
        "train_whole_v4.png",
    ),
)  # fmt: skip
#: Metric -> label of its axis.
METRICS = {"lm_loss": "training loss (nats per token)", "indexer_loss": "indexer's loss"}


def losses(points: list[Point], way: str, metric: str) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for point in points:
        if point.way == way and metric in point.values and point.part != "all":
            found.setdefault(point.case["run"], {})[int(point.part)] = point.values[metric]
    return {seed: dict(sorted(curve.items())) for seed, curve in found.items()}


def apart(points: list[Point], way: str, first: str, metric: str) -> dict[int, dict[int, float]]:
    """Return by seed and step the difference of a way to ``first``."""
    base, mine = (losses(points, name, metric) for name in (first, way))
    return {
        seed: {step: mine[seed][step] - base[seed][step] for step in mine[seed]
               if step in base[seed]}
        for seed in mine if seed in base
    }  # fmt: skip


def draw_same(points: list[Point], folder: Path) -> list[Path]:
    drawn = []
    for comparison in COMPARISONS:
        found = [p for p in points if p.case["kind"] == comparison.kind and p.part != "all"]
        if found:
            drawn.append(_draw(comparison, of_one_gpu(found), folder))
    return drawn


def _draw(comparison: Comparison, points: list[Point], folder: Path) -> Path:
    """Draw both losses by step, and below their distance from the first way."""
    labels, (first, *others) = comparison.labels, comparison.labels
    figure, axes = pyplot.subplots(2, len(METRICS), figsize=(12, 7), sharex=True, squeeze=False)
    for (metric, name), (above, below) in zip(METRICS.items(), axes.T, strict=True):
        for way, colour in zip(labels, COLOURS, strict=True):
            for number, curve in enumerate(losses(points, way, metric).values()):
                label = None if number else labels[way]
                above.plot(list(curve), list(curve.values()), color=colour, label=label, lw=1)
        for way, colour in zip(others, COLOURS[1:], strict=True):
            for curve in apart(points, way, first, metric).values():
                below.plot(list(curve), list(curve.values()), color=colour, lw=1)
        below.axhline(0, color=COLOURS[0], lw=1)
        above.set(ylabel=name)
        below.set(xlabel="step", ylabel=f"more than {labels[first]}")
        above.legend(fontsize=8, frameon=False)
        for axis in (above, below):
            axis.grid(alpha=0.3)
    title = f"{comparison.title}: {machine(points)}"
    return save(figure, title, folder / comparison.file)
