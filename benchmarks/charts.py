"""Charts of :mod:`benchmarks.comparisons`: ``python -m benchmarks charts`` writes them.

One claim each: ratios on a linear axis, at most four lines, readable on a phone and in greyscale.
"""

import math
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot, ticker

from benchmarks.comparisons import COMPARISONS, Comparison, all_ratios, claim, place_name
from megatron_dsa.training.files.whole import whole_file

#: Colour, dashes and marker by line. Greyscale keeps them apart.
STYLES = (
    ("#000000", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#d55e00", "-.", "^"),
    ("#8c8c8c", ":", "D"),
)
#: Least distance of two labels, as a share of the axis.
LABEL_GAP = 0.13


def draw_all(folder: Path) -> list[Path]:
    """Draw the charts whose CSVs are in a folder, next to them; return the files."""
    return [
        draw(comparison, folder)
        for comparison in COMPARISONS
        if comparison.charted and (folder / f"{comparison.family}.csv").exists()
    ]


def draw(comparison: Comparison, folder: Path) -> Path:
    """Draw one comparison; return the file."""
    found = all_ratios(comparison, folder)
    lines = {line.label: found[line.label] for line in comparison.lines if line.drawn}
    percent = comparison.metric == "efficiency"
    unit = 100 if percent else 1
    figure, axis = pyplot.subplots(figsize=(7.2, 5.4))
    axis.axhline(unit, color="black", linewidth=1)
    ends = {}
    for (label, cells), (colour, dashes, marker) in zip(lines.items(), STYLES, strict=False):
        points = [(_x(comparison, place), unit * cell.ratio) for place, cell in cells.items()]
        axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=2.5)
        for point, cell in zip(points, cells.values(), strict=True):
            face = "white" if cell.date < comparison.since else colour
            axis.plot(*point, marker, color=colour, markerfacecolor=face, markersize=8,
                      markeredgewidth=2)  # fmt: skip
        ends[label] = (*points[-1], colour)
    ratios = [unit * cell.ratio for cells in lines.values() for cell in cells.values()]
    high = max(unit, *ratios)
    axis.set_ylim(comparison.low, high + 0.08 * (high - comparison.low))
    _label_ends(axis, ends)
    places = {place for cells in lines.values() for place in cells}
    names = {_x(comparison, place): _tick(comparison, place) for place in places}
    axis.set_xticks(list(names), list(names.values()))
    axis.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda y, _: f"{y:.0f} %" if percent else f"{y:g}x")
    )
    axis.tick_params(labelsize=14)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_title(comparison.axis.rsplit(" (", 1)[0], fontsize=13, loc="left")
    older = any(c.date < comparison.since for cells in lines.values() for c in cells.values())
    along = {"part": "training step", "preset": ""}.get(comparison.along, "tokens")
    note = "hollow: older runs, see the table" if older else ""
    axis.set_xlabel(f"{along}   {comparison.gpu}   {note}".strip(), fontsize=12)
    title = textwrap.fill(claim(comparison, found), 52)
    figure.suptitle(title, x=0.02, ha="left", fontsize=16, fontweight="bold")
    figure.tight_layout()
    target = folder / f"{comparison.name}.png"
    with whole_file(target) as file:
        figure.savefig(file, dpi=100)
    pyplot.close(figure)
    return target


def _x(comparison: Comparison, place) -> float:
    """Return where a position lies: lengths by their logarithm, steps as they are."""
    if comparison.names:
        return list(comparison.names).index(place)
    return place if comparison.along == "part" else math.log2(place)


def _tick(comparison: Comparison, place) -> str:
    """Return the name of a position; lengths between powers of two have none, for space."""
    if comparison.along == "tokens" and place & (place - 1):
        return ""
    return place_name(comparison, place) if comparison.along != "part" or not place % 100 else ""


def _label_ends(axis, ends: dict[str, tuple[float, float, str]]) -> None:
    """Write each line's name to the right of its end, moved apart where they would overlap."""
    low, high = axis.get_ylim()
    first, last = axis.get_xlim()
    for x in {x for x, _, _ in ends.values()}:
        order = sorted((label for label in ends if ends[label][0] == x), key=lambda n: ends[n][1])
        heights = _spread([(ends[label][1] - low) / (high - low) for label in order])
        for label, height in zip(order, heights, strict=True):
            text = textwrap.fill(label.replace("`", ""), 17)
            axis.text(x + 0.04 * (last - first), low + height * (high - low), text, fontsize=14,
                      color=ends[label][2], va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


def _spread(heights: list[float]) -> list[float]:
    """Return ascending shares of the axis, at least a label apart and around their old middle."""
    found = list(heights)
    for number in range(1, len(found)):
        found[number] = max(found[number], found[number - 1] + LABEL_GAP)
    down = (sum(found) - sum(heights)) / len(found)
    return [height - down for height in found]
