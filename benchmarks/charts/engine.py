"""Chart of transformer-engine's layers: tokens per second, a panel per stack."""

from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save, thousands


def draw_engine(points: list[Point], folder: Path) -> list[Path]:
    """Draw tokens per second of every way, and its time relative to ``te-bf16``."""
    points = of_one_gpu([point for point in points if point.part == "step"])
    if not points:
        return []
    cases = sorted({(p.case["mlp"], p.case["tokens"]) for p in points})
    figure, axes = pyplot.subplots(
        1, len(cases), figsize=(max(9, 2 + 3.5 * len(cases)), 4.5), squeeze=False, sharey=True
    )
    for axis, (mlp, tokens) in zip(axes[0], cases, strict=True):
        mine = [p for p in points if (p.case["mlp"], p.case["tokens"]) == (mlp, tokens)]
        bars = axis.bar([p.way for p in mine], [p.values["tokens_per_s"] / 1e3 for p in mine])
        axis.bar_label(bars, [bar_label(point) for point in mine], fontsize=8)
        axis.tick_params(axis="x", labelrotation=30)
        axis.margins(y=0.1)
        axis.set(title=f"{mlp} MLP, {thousands(tokens)} tokens" if mlp == "dense" else
                 f"{mlp}, {thousands(tokens)} tokens")  # fmt: skip
        axis.grid(alpha=0.3, axis="y")
    axes[0][0].set(ylabel="thousand tokens per second")
    title = f"Two layers of V3.2's width; numbers: time over te-bf16's\n{machine(points)}"
    return [save(figure, title, folder / "engine_tokens_per_s.png")]


def bar_label(point: Point) -> str:
    ratio = point.values.get("time_over_te")
    return "" if ratio is None else f"{ratio:.3f}"
