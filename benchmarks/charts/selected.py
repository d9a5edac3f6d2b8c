"""The chart of the two attentions to selected keys: losses of the same training."""

from __future__ import annotations

from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save
from benchmarks.train.selected import WAYS

LABELS = {"sparse": "sparse attention", "masked": "masked dense attention",
          "sparse again": "sparse attention, another run"}  # fmt: skip
COLOURS = {"sparse": "#0072b2", "masked": "#d55e00", "sparse again": "#56b4e9"}
#: Metric -> what its axis is called.
METRICS = {"lm_loss": "training loss (nats per token)", "indexer_loss": "indexer's loss"}


def losses(points: list[Point], way: str, metric: str) -> dict[int, dict[int, float]]:
    """Return a metric of a way by seed and step, steps in ascending order."""
    found: dict[int, dict[int, float]] = {}
    for point in points:
        if point.way == way and metric in point.values and point.part != "all":
            found.setdefault(point.case["run"], {})[int(point.part)] = point.values[metric]
    return {seed: dict(sorted(curve.items())) for seed, curve in found.items()}


def apart(points: list[Point], way: str, metric: str) -> dict[int, dict[int, float]]:
    """Return by seed and step what a way has more than ``sparse``."""
    sparse, mine = (losses(points, name, metric) for name in ("sparse", way))
    return {
        seed: {step: mine[seed][step] - sparse[seed][step] for step in mine[seed]
               if step in sparse[seed]}
        for seed in mine if seed in sparse
    }  # fmt: skip


def draw_selected(points: list[Point], folder: Path) -> list[Path]:
    """Draw loss and indexer's loss by step, and below how far they are from sparse attention's."""
    points = [p for p in points if p.case["kind"] == "selected" and p.part != "all"]
    if not points:
        return []
    points = of_one_gpu(points)
    figure, axes = pyplot.subplots(2, len(METRICS), figsize=(12, 7), sharex=True, squeeze=False)
    for (metric, name), (above, below) in zip(METRICS.items(), axes.T, strict=True):
        for way in WAYS:
            for number, curve in enumerate(losses(points, way, metric).values()):
                label = None if number else LABELS[way]
                above.plot(list(curve), list(curve.values()), color=COLOURS[way], label=label, lw=1)
            if way == "sparse":
                continue
            for curve in apart(points, way, metric).values():
                below.plot(list(curve), list(curve.values()), color=COLOURS[way], lw=1)
        below.axhline(0, color=COLOURS["sparse"], lw=1)
        above.set(ylabel=name)
        below.set(xlabel="step", ylabel="more than sparse attention")
        above.legend(fontsize=8, frameon=False)
        for axis in (above, below):
            axis.grid(alpha=0.3)
    title = f"The same training with two attentions to selected keys: {machine(points)}"
    return [save(figure, title, folder / "train_selected.png")]
