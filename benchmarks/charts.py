"""Charts of the attention benchmark, drawn from its CSV; they are written next to it.

* ``<csv>_<preset>_tflops.png``: speed of forward and backward against the number of keys.
* ``<csv>_<preset>_shares.png``: where the time of a layer goes, with the fastest implementation of
  every operation and with torch for all. An operation that others can save counts all the same:
  torch's backward, for one, has the teacher at hand.

Where a file holds several runs of one measurement, the last one counts. GPUs and query counts are
kept apart.

Of the hybrid benchmark: ``<csv>_pieces.png``, the share of the copy bandwidth of every piece, and
``<csv>_<preset>_layers.png``, where the kernel time of a training step goes.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot, ticker

from benchmarks.cases import PARTS

SPEED_OPERATIONS = ("forward", "backward")
LINE_STYLES = ("-", "--", ":", "-.")
PACKAGES = {
    "flash_mla": "FlashMLA",
    "cudnn_frontend": "cuDNN front end",
    "tilelang": "TileLang",
    "triton": "Triton",
}


def draw_charts(path: Path) -> list[Path]:
    """Draw what the rows of a CSV allow; return the files that were written."""
    rows = read_rows(path)
    # What tells two charts of one preset apart goes into their names, the rest does not.
    several_gpus = len({row["gpu"] for row in rows}) > 1
    several_counts = len({row["queries"] for row in rows}) > 1
    written = []
    for gpu, preset, queries in dict.fromkeys(_chart_key(row) for row in rows):
        mine = [row for row in rows if _chart_key(row) == (gpu, preset, queries)]
        parts = [path.stem, preset]
        if several_gpus:
            parts.append(re.sub(r"\W+", "-", gpu).strip("-").lower())
        if several_counts:
            parts.append(f"{queries}q")
        for name, draw in (("tflops", draw_speed), ("shares", draw_shares)):
            target = path.with_name("_".join([*parts, name]) + ".png")
            if draw(mine, target):
                written.append(target)
    return written


def read_rows(path: Path) -> list[dict]:
    """Return the last ``ok`` row of every measurement, numbers as numbers."""
    last: dict[tuple, dict] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] != "ok":
                continue
            row["skv"], row["queries"] = int(row["skv"]), int(row["queries"])
            row["median_ms"] = float(row["median_ms"])
            row["tflops"] = float(row["tflops"]) if row["tflops"] else None
            names = ("skv", "distribution", "operation", "implementation")
            key = (*_chart_key(row), *(row[name] for name in names))
            last.pop(key, None)  # a later run also moves to the end: its versions are the title's
            last[key] = row
    return list(last.values())


def _chart_key(row: dict) -> tuple[str, str, int]:
    return row["gpu"], row["preset"], row["queries"]


def _title(rows: list[dict]) -> str:
    row = rows[-1]
    return (
        f"{row['preset']}: {row['heads']} heads, dims {row['qk_dim']}/{row['v_dim']}, "
        f"K = {row['topk']}, {row['queries']} queries\n{_machine(row)}"
    )


def _machine(row: dict) -> str:
    versions = [f"torch {row['torch']}"]
    if row["cuda"]:
        versions.append(f"CUDA {row['cuda']}")
    for column, name in PACKAGES.items():
        if row.get(column):  # "unknown" is a package without metadata
            versions.append(name if row[column] == "unknown" else f"{name} {row[column]}")
    return f"{row['gpu']}, {', '.join(versions)}"


def draw_speed(rows: list[dict], target: Path) -> bool:
    """Draw TFLOP/s against the keys, one line per implementation and index distribution."""
    operations = [name for name in SPEED_OPERATIONS if any(r["operation"] == name for r in rows)]
    if not operations:
        return False
    implementations = _names(rows, "implementation", operations)
    distributions = _names(rows, "distribution", operations)
    figure, axes = pyplot.subplots(
        1, len(operations), figsize=(6 * len(operations), 5), squeeze=False, sharey=True
    )
    for axis, operation in zip(axes[0], operations, strict=True):
        for number, implementation in enumerate(implementations):
            for style, distribution in enumerate(distributions):
                line = {
                    row["skv"]: row["tflops"]
                    for row in rows
                    if (row["operation"], row["implementation"], row["distribution"])
                    == (operation, implementation, distribution)
                }
                if line:
                    axis.plot(
                        sorted(line), [line[skv] for skv in sorted(line)], marker="o",
                        color=f"C{number}", linestyle=LINE_STYLES[style % len(LINE_STYLES)],
                        label=f"{implementation}, {distribution}",
                    )  # fmt: skip
        peaks = [row["tflops"] for row in rows if row["operation"] == "gemm"]
        if peaks:
            peak = sorted(peaks)[len(peaks) // 2]
            axis.axhline(peak, color="k", linewidth=1, label=f"bf16 GEMM, {peak:.3g} TFLOP/s")
        lengths = sorted({row["skv"] for row in rows})
        axis.set(title=operation, xlabel="keys", ylabel="TFLOP/s", xscale="log", ylim=(0, None))
        axis.yaxis.set_tick_params(labelleft=True)
        axis.set_xticks(lengths, [_thousands(n) for n in lengths])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(figure, _title(rows), target)
    return True


def draw_shares(rows: list[dict], target: Path) -> bool:
    """Draw each operation's share of the time: stacked bars, the total written behind them."""
    operations = [name for name in PARTS if any(row["operation"] == name for row in rows)]
    bars = list(_bars(rows, operations))
    if len(operations) < 2 or not bars:
        return False
    figure, axis = pyplot.subplots(figsize=(9, 1.8 + 0.36 * len(bars)))
    left = [0.0] * len(bars)
    for operation in operations:
        shares = [100 * times[operation] / sum(times.values()) for _, times in bars]
        drawn = axis.barh(range(len(bars)), shares, left=left, label=operation)
        labels = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        axis.bar_label(drawn, labels, label_type="center", fontsize=8, color="white")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, (_, times) in enumerate(bars):
        total = sum(times.values())
        text = f"{total:.0f} ms" if total >= 100 else f"{total:.3g} ms"
        axis.text(101, place, text, va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="share of the time, %", xlim=(0, 112))
    axis.set_xticks(range(0, 101, 20))
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=len(operations), fontsize=8, frameon=False)
    _save(figure, _title(rows), target, bottom=0.3 / figure.get_figheight())
    return True


def _bars(rows: list[dict], operations: list[str]):
    """Yield ``(label, {operation: ms})`` where every operation was measured."""
    for skv in sorted({row["skv"] for row in rows}):
        for distribution in dict.fromkeys(row["distribution"] for row in rows):
            mine = [r for r in rows if (r["skv"], r["distribution"]) == (skv, distribution)]
            for name in ("fastest", "torch"):
                times: dict[str, float] = {}
                for row in mine:
                    operation, ms = row["operation"], row["median_ms"]
                    if operation in operations and name in ("fastest", row["implementation"]):
                        times[operation] = min(ms, times.get(operation, ms))
                if len(times) == len(operations):
                    in_order = {operation: times[operation] for operation in operations}
                    yield f"{_thousands(skv)} keys, {distribution}, {name}", in_order


def _names(rows: list[dict], column: str, operations: list[str]) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows if row["operation"] in operations))


def _thousands(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _save(figure, title: str, target: Path, bottom: float = 0.0) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


# The hybrid benchmark


def draw_hybrid(path: Path) -> list[Path]:
    """Draw what the rows of a hybrid CSV allow; return the files that were written."""
    key = ("gpu", "part", "preset", "operation", "ratio", "rows", "heads", "dim", "topk",
           "implementation")  # fmt: skip
    last: dict[tuple, dict] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "ok":
                last.pop(place := tuple(row[name] for name in key), None)
                last[place] = row
    if not last:
        return []
    # One machine to a chart: the last that wrote to the file.
    gpu = list(last.values())[-1]["gpu"]
    rows = [row for row in last.values() if row["gpu"] == gpu]
    written = []
    if found := [row for row in rows if row["share_of_copy"]]:
        written.append(draw_pieces(found, path.with_name(f"{path.stem}_pieces.png")))
    found = [row for row in rows if row["share_of_time"] and float(row["share_of_time"]) > 0]
    for preset in dict.fromkeys(row["preset"] for row in found):
        mine = [row for row in found if row["preset"] == preset]
        written.append(draw_layers(mine, path.with_name(f"{path.stem}_{preset}_layers.png")))
    return written


def draw_pieces(rows: list[dict], target: Path) -> Path:
    """Draw the share of the copy bandwidth, one panel per length, a bar per implementation."""
    lengths = sorted({int(row["rows"]) for row in rows})
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    names = list(dict.fromkeys(_piece(row) for row in rows))
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(3 + 4 * len(lengths), 2 + 0.4 * len(names)), squeeze=False,
        sharey=True,
    )  # fmt: skip
    height = 0.8 / len(implementations)
    for axis, length in zip(axes[0], lengths, strict=True):
        for number, implementation in enumerate(implementations):
            share = {
                _piece(row): 100 * float(row["share_of_copy"])
                for row in rows
                if (int(row["rows"]), row["implementation"]) == (length, implementation)
            }
            places = [place + number * height for place in range(len(names))]
            axis.barh(places, [share.get(name, 0) for name in names], height, label=implementation)
        axis.axvline(100, color="k", linewidth=1)
        axis.set(title=f"{_thousands(length)} rows", xlabel="share of the copy bandwidth, %")
        axis.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
        axis.grid(alpha=0.3, axis="x")
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    _save(figure, f"Pieces of hybrid attention\n{_machine(rows[-1])}", target)
    return target


def _piece(row: dict) -> str:
    names = ("ratio", "heads", "dim", "topk")
    given = ", ".join(f"{name} {row[name]}" for name in names if row[name])
    return f"{row['operation']}, {given}"


def draw_layers(rows: list[dict], target: Path) -> Path:
    """Draw where the kernel time of a step goes: stacked bars, the total written behind them."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        label = f"{_thousands(int(row['rows']))}, ratio {row['ratio']}, {row['implementation']}"
        operation = row["operation"].removeprefix("step/")
        bars.setdefault(label, {})[operation] = float(row["median_ms"])
    operations = sorted(
        {operation for times in bars.values() for operation in times},
        key=lambda name: -sum(times.get(name, 0) for times in bars.values()),
    )
    figure, axis = pyplot.subplots(figsize=(11, 2.4 + 0.36 * len(bars)))
    colours = pyplot.get_cmap("tab20").colors
    totals = [sum(times.values()) for times in bars.values()]
    left = [0.0] * len(bars)
    for number, operation in enumerate(operations):
        shares = [
            100 * times.get(operation, 0) / total
            for times, total in zip(bars.values(), totals, strict=True)
        ]
        colour = colours[number % len(colours)]
        drawn = axis.barh(range(len(bars)), shares, left=left, label=operation, color=colour)
        labels = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        axis.bar_label(drawn, labels, label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, total in enumerate(totals):
        axis.text(101, place, f"{total:.3g} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="share of the kernel time of a step, %", xlim=(0, 112))
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=5, fontsize=8,
                  frameon=False)  # fmt: skip
    title = f"{rows[-1]['preset']}: layers of hybrid attention\n{_machine(rows[-1])}"
    _save(figure, title, target, bottom=0.9 / figure.get_figheight())
    return target
