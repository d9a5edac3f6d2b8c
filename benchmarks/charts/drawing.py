"""Shared parts of charts: points of the CSVs, titles, axes, stacked bars, files."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot, ticker

from benchmarks.schema import latest, read_csv
from megatron_dsa.training.files.whole import whole_file

PACKAGES = {
    "flash_mla": "FlashMLA",
    "cudnn_frontend": "cuDNN front end",
    "tilelang": "TileLang",
    "transformer_engine": "transformer-engine",
    "triton": "Triton",
}


@dataclass(frozen=True)
class Point:
    """Measurements of one part of a case, one way.

    Attributes:
        case: fields of the case's dataclass; part, way: see :mod:`benchmarks.schema`.
        gpu: name; versions: of the packages.
        values: metric -> value.
    """

    case: dict
    part: str
    way: str
    gpu: str
    versions: dict
    values: dict[str, float]


def points_of(path: Path) -> list[Point]:
    """Return the successful measurements, each from its last run."""
    found: dict[tuple, Point] = {}
    for row in latest(read_csv(path)):
        if row["status"] == "ok" and row["value"] is not None:
            key = (str(row["case"]), row["part"], row["way"], row["gpu"])
            point = Point(row["case"], row["part"], row["way"], row["gpu"], row["versions"], {})
            found.setdefault(key, point).values[row["metric"]] = row["value"]
    return list(found.values())


def of_one_gpu(points: list[Point]) -> list[Point]:
    """Return the points of the GPU with the most."""
    ((gpu, _),) = Counter(point.gpu for point in points).most_common(1) or [("", 0)]
    return [point for point in points if point.gpu == gpu]


def machine(points: list[Point]) -> str:
    """Return GPU and versions of the last measurement."""
    versions = points[-1].versions
    texts = [points[-1].gpu, f"torch {versions['torch']}"]
    if "cuda" in versions:
        texts.append(f"CUDA {versions['cuda']}")
    for key, name in PACKAGES.items():
        if key in versions:  # "unknown": without metadata
            texts.append(name if versions[key] == "unknown" else f"{name} {versions[key]}")
    return ", ".join(texts)


def thousands(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def mark_lengths(axis, lengths: list[int]) -> None:
    """Mark the measured lengths; if many, label powers of two only."""
    names = [thousands(n) if n & (n - 1) == 0 or len(lengths) < 6 else "" for n in lengths]
    axis.set_xticks(lengths, names)
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.yaxis.set_tick_params(labelleft=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def save(figure, title: str, target: Path, bottom: float = 0.0) -> Path:
    # A relative position would put the title of a tall figure into its panels.
    figure.suptitle(title, fontsize=10, y=1 - 0.1 / figure.get_figheight())
    figure.tight_layout(rect=(0, bottom, 1, 1))
    with whole_file(target) as file:
        figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return target


def draw_shares(bars: dict[str, dict[str, float]], label: str, title: str, target: Path) -> Path:
    """Draw parts of times as stacked bars, labelled with the total.

    ``bars``: label -> part -> milliseconds; ``label``: of the axis.
    """
    parts = list(dict.fromkeys(part for times in bars.values() for part in times))
    totals = [sum(times.values()) for times in bars.values()]
    figure, axis = pyplot.subplots(figsize=(11, 2.4 + 0.36 * len(bars)))
    colours, left = pyplot.get_cmap("tab20").colors, [0.0] * len(bars)
    for number, part in enumerate(parts):
        shares = [100 * times.get(part, 0) / total for times, total in
                  zip(bars.values(), totals, strict=True)]  # fmt: skip
        drawn = axis.barh(range(len(bars)), shares, left=left, label=part,
                          color=colours[number % len(colours)])  # fmt: skip
        labels = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        axis.bar_label(drawn, labels, label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, total in enumerate(totals):
        text = f"{total:.0f} ms" if total >= 100 else f"{total:.3g} ms"
        axis.text(101, place, text, va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=label, xlim=(0, 112))
    axis.set_xticks(range(0, 101, 20))
    lines = math.ceil(len(parts) / 5)
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=5, fontsize=8,
                  frameon=False)  # fmt: skip
    return save(figure, title, target, bottom=(0.1 + 0.25 * lines) / figure.get_figheight())
