"""Chart of Muon's blocks: losses of a small V4 by optimizer."""

import statistics
from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save
from benchmarks.charts.same import losses
from benchmarks.train.muon import WAYS

LABELS = {
    "adamw": "AdamW",
    "released": "Muon as Megatron has it",
    "groups": "Muon, output groups as blocks, tables to AdamW",
    "heads": "the same, and head by head",
}
COLOURS = {"adamw": "#4d4d4d", "released": "#d55e00", "groups": "#0072b2", "heads": "#009e73"}
#: Steps averaged in a line.
MEAN_OF = 10


def smooth(curve: dict[int, float]) -> dict[int, float]:
    steps = list(curve)
    return {
        step: statistics.mean(curve[s] for s in steps[max(i + 1 - MEAN_OF, 0) : i + 1])
        for i, step in enumerate(steps)
    }


def gaps(points: list[Point], way: str) -> dict[int, dict[int, float]]:
    mine, released = (losses(points, name, "lm_loss") for name in (way, "released"))
    return {
        seed: {step: loss - smooth(released[seed])[step] for step, loss in smooth(curve).items()}
        for seed, curve in mine.items() if seed in released
    }  # fmt: skip


def draw_muon(points: list[Point], folder: Path) -> list[Path]:
    """Draw training and validation loss by step, and their distance from Megatron's Muon."""
    points = [p for p in points if p.case["kind"] == "muon" and p.part != "all"]
    if not points:
        return []
    points = of_one_gpu(points)
    figure, (training, apart, validation) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    for way in WAYS:
        for number, curve in enumerate(losses(points, way, "lm_loss").values()):
            label, smoothed = None if number else LABELS[way], smooth(curve)
            training.plot(list(smoothed), list(smoothed.values()), color=COLOURS[way], label=label,
                          lw=1.2)  # fmt: skip
        for curve in losses(points, way, "validation_loss").values():
            validation.plot(list(curve), list(curve.values()), color=COLOURS[way], marker="o", ms=3)
        for curve in gaps(points, way).values() if way != "adamw" else ():
            apart.plot(list(curve), list(curve.values()), color=COLOURS[way], lw=1.2)
    training.set(xlabel="step", ylabel=f"training loss, mean of {MEAN_OF} steps (nats per token)")
    apart.set(xlabel="step", ylabel="more than Megatron's Muon")
    validation.set(xlabel="step", ylabel="validation loss (nats per token)")
    training.legend(fontsize=8, frameon=False)
    for axis in (training, apart, validation):
        axis.grid(alpha=0.3)
    title = f"A small V4 by optimizer, a line per seed: {machine(points)}"
    return [save(figure, title, folder / "train_muon.png")]
