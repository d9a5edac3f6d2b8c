"""Chart of convergence: losses of sparse and dense attention on the same text."""

import math
import statistics
from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save
from benchmarks.charts.muon import draw_muon
from benchmarks.charts.same import draw_same
from benchmarks.train.convergence import WAYS

LABELS = {
    "dense": "dense MLA",
    "sparse": "V3.2, sparse from the start",
    "staged": "V3.2, dense for a third, then sparse",
    "hybrid": "V4 hybrid, from the start",
}
COLOURS = {"dense": "#4d4d4d", "sparse": "#0072b2", "staged": "#e69f00", "hybrid": "#009e73"}
LOSS = "validation_loss"


def draw_train(points: list[Point], folder: Path) -> list[Path]:
    found = [p for p in points if p.case["kind"] == "convergence" and LOSS in p.values]
    drawn = [draw(of_one_gpu(found), folder / "train_convergence.png")] if found else []
    return drawn + draw_same(points, folder) + draw_muon(points, folder)


def curves(points: list[Point], way: str, metric: str) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for point in points:
        if point.way == way and metric in point.values:
            found.setdefault(point.case["run"], {})[int(point.part)] = point.values[metric]
    return found


def bits(points: list[Point], way: str) -> dict[int, dict[int, float]]:
    """Return validation loss in bits per byte (a token is a byte) by seed and step."""
    return {
        seed: {step: loss / math.log(2) for step, loss in losses.items()}
        for seed, losses in curves(points, way, LOSS).items()
    }


def gaps(points: list[Point], way: str) -> dict[int, list[float]]:
    """Return by step, for every seed, the bits per byte that a way needs above dense."""
    dense, mine = bits(points, "dense"), bits(points, way)
    found: dict[int, list[float]] = {}
    for seed in sorted(dense.keys() & mine.keys()):
        for step in sorted(dense[seed].keys() & mine[seed].keys()):
            found.setdefault(step, []).append(mine[seed][step] - dense[seed][step])
    return found


def noise(points: list[Point]) -> tuple[dict[int, float], dict[int, float]]:
    """Return by step the dense seeds' distance below and above their mean."""
    by_step: dict[int, list[float]] = {}
    for curve in bits(points, "dense").values():
        for step, loss in curve.items():
            by_step.setdefault(step, []).append(loss)
    means = {step: statistics.mean(values) for step, values in by_step.items()}
    low, high = (
        {step: edge(values) - means[step] for step, values in by_step.items()}
        for edge in (min, max)
    )
    return low, high


def draw(points: list[Point], target: Path) -> Path:
    """Draw validation loss by step and time, and the gap to dense attention."""
    figure, (by_step, by_time, gap) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    for way in WAYS:
        seconds = curves(points, way, "training_s")
        for number, (seed, losses) in enumerate(bits(points, way).items()):
            style = {"color": COLOURS[way], "label": None if number else LABELS[way], "lw": 1.4}
            by_step.plot(list(losses), list(losses.values()), **style)
            times = seconds.get(seed, {})  # parallel runs have none
            by_time.plot(list(times.values()), [losses[step] for step in times], **style)
        apart = gaps(points, way)
        if way == "dense" or not apart:
            continue
        means = [statistics.mean(values) for values in apart.values()]
        gap.plot(list(apart), means, color=COLOURS[way], marker="o", ms=3.5)
        low, high = ([edge(values) for values in apart.values()] for edge in (min, max))
        gap.fill_between(list(apart), low, high, color=COLOURS[way], alpha=0.2, lw=0)
    low, high = (list(edge.values()) for edge in noise(points))
    gap.fill_between(list(noise(points)[0]), low, high, color="0.88", lw=0, zorder=0)
    gap.axhline(0, color=COLOURS["dense"], lw=1)
    by_step.set(xlabel="step", ylabel="validation loss (bits per byte)")
    by_time.set(xlabel="training time (s)", ylabel="validation loss (bits per byte)")
    gap.set(xlabel="step", ylabel="gap to dense MLA (bits per byte)")
    seeds = len({point.case["run"] for point in points})
    gap.set_title(f"mean, range of {seeds} seeds; grey: dense alone, around its mean", fontsize=9)
    by_step.set_title("a line per seed", fontsize=9)
    by_time.set_title("training steps alone, one run on the GPU at a time", fontsize=9)
    by_step.legend(fontsize=8, frameon=False)
    for axis in (by_step, by_time, gap):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    title = f"Sparse and dense attention on the same text: {machine(points)}"
    return save(figure, title, target)
