"""Charts of several ranks: efficiency and exposed communication."""

import json
from pathlib import Path

from benchmarks.charts.drawing import Point, machine, of_one_gpu, pyplot, save, thousands
from benchmarks.ranks.cases import ALONE, LAYERS

#: Output of ``python -m benchmarks ranks --timelines``.
TIMELINES = "ranks_timelines.jsonl"
#: Metric -> label of its bar.
BARS = {"efficiency": "parallel efficiency, %", "exposed_share": "exposed communication, %"}


def draw_ranks(points: list[Point], folder: Path) -> list[Path]:
    written = []
    layers = [p for p in points if p.case["kind"] == LAYERS and p.part == "step"]
    layers = [p for p in layers if "efficiency" in p.values]
    for ranks in sorted({p.case["tp"] * p.case["cp"] for p in layers}):
        mine = of_one_gpu([p for p in layers if p.case["tp"] * p.case["cp"] == ranks])
        written.append(draw_layers(mine, folder / f"ranks_{ranks}gpus_layers.png"))
    if (timelines := folder / TIMELINES).exists():
        written += draw_timelines(timelines)
    return written


def draw_layers(points: list[Point], target: Path) -> Path:
    """Draw two bars per way: efficiency, and the share of a step in which only NCCL runs."""
    figure, axis = pyplot.subplots(figsize=(10, 2 + 0.5 * len(points)))
    for number, (metric, label) in enumerate(BARS.items()):
        values = [point.values.get(metric) for point in points]
        places = [place + 0.4 * number for place in range(len(points))]
        drawn = axis.barh(places, [100 * (v or 0) for v in values], 0.4, label=label)
        # Ways without a trace have neither bar nor number.
        texts = ["" if v is None else f"{100 * v:.0f}" for v in values]
        axis.bar_label(drawn, texts, fontsize=8)
    axis.axvline(100, color="k", linewidth=1)
    labels = [label_of(point) for point in points]
    axis.set_yticks([place + 0.2 for place in range(len(points))], labels)
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    figure.legend(loc="lower center", ncols=2, fontsize=8, frameon=False)
    title = f"Training steps of attention layers\n{machine(points)}"
    return save(figure, title, target, bottom=0.3 / figure.get_figheight())


def draw_timelines(file: Path) -> list[Path]:
    """Draw ``ranks --timelines``, a line per way, rank and kind of kernels."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    height = 1 + 1.7 * len(lines)
    figure, axes = pyplot.subplots(len(lines), figsize=(10, height), squeeze=False)
    for axis, line in zip(axes[:, 0], lines, strict=True):
        for rank, timeline in enumerate(line["ranks"]):
            for number, (name, intervals) in enumerate(timeline.items()):
                spans = [(begin, end - begin) for begin, end in intervals]
                label = name if rank == 0 else None
                axis.broken_barh(spans, (rank + 0.4 * number, 0.4), color=f"C{number}", label=label)
        ranks = range(len(line["ranks"]))
        axis.set_yticks([rank + 0.4 for rank in ranks], ranks)
        axis.invert_yaxis()
        axis.set_ylabel("rank")
        versions = {name: version for name, version in line["versions"].items() if version}
        point = Point(line["case"], "step", line["way"], line["gpu"], versions, {})
        axis.set_title(label_of(point), fontsize=9)
    axes[-1, 0].set_xlabel("ms")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=2, fontsize=8, frameon=False)
    title = f"Kernels of a training step\n{machine([point])}"
    return [save(figure, title, file.with_suffix(".png"), bottom=0.3 / height)]


def label_of(point: Point) -> str:
    case, way = point.case, point.way
    ratio = f" ratio {case['ratio']}" if "ratio" in case else ""
    chain = f" x {case['layers']}" if case["layers"] > 1 else ""
    grid = " ".join(f"{name}{case[name]}" for name in ("tp", "cp") if case[name] > 1)
    how = way if way in ALONE else f"{grid} {way}"
    how += ", graph" if case.get("graph") else ""
    return f"{case['preset']}{ratio}{chain}, {thousands(case['tokens'])}, {how}"
