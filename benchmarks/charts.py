"""Charts of :mod:`benchmarks.comparisons`: ``python -m benchmarks charts`` writes them.

One claim each: ratios on a linear axis, at most four lines, readable on a phone and in greyscale.
"""

import math
import textwrap
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Chart:
    """A chart of ratios.

    Attributes:
        title: the result; axis: what the ratios are; along: what is below them.
        lines: label -> points: position, ratio, whether the marker is hollow.
        ticks: position -> name.
        low: where the axis begins; percent: ratios are shares.
    """

    title: str
    axis: str
    along: str
    lines: dict[str, list[tuple[float, float, bool]]]
    ticks: dict[float, str]
    low: float = 0.0
    percent: bool = False

    def draw(self, target: Path) -> Path:
        """Draw it; return the file."""
        unit = 100 if self.percent else 1
        figure, axis = pyplot.subplots(figsize=(7.2, 5.4))
        axis.axhline(unit, color="black", linewidth=1)
        ends = {}
        for (label, points), (colour, dashes, marker) in zip(
            self.lines.items(), STYLES, strict=False
        ):
            scaled = [(x, unit * y) for x, y, _ in points]
            axis.plot(*zip(*scaled, strict=True), color=colour, linestyle=dashes, linewidth=2.5)
            for point, (_, _, hollow) in zip(scaled, points, strict=True):
                axis.plot(*point, marker, color=colour, markersize=8, markeredgewidth=2,
                          markerfacecolor="white" if hollow else colour)  # fmt: skip
            ends[label] = (*scaled[-1], colour)
        high = max(unit, *(unit * y for points in self.lines.values() for _, y, _ in points))
        axis.set_ylim(self.low, high + 0.08 * (high - self.low))
        _label_ends(axis, ends)
        axis.set_xticks(list(self.ticks), list(self.ticks.values()))
        axis.yaxis.set_major_formatter(
            ticker.FuncFormatter(lambda y, _: f"{y:.0f} %" if self.percent else f"{y:g}x")
        )
        axis.tick_params(labelsize=14)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_title(self.axis, fontsize=13, loc="left")
        axis.set_xlabel(self.along, fontsize=12)
        title = textwrap.fill(self.title, 52)
        figure.suptitle(title, x=0.02, ha="left", fontsize=16, fontweight="bold")
        figure.tight_layout()
        with whole_file(target) as file:
            figure.savefig(file, dpi=100)
        pyplot.close(figure)
        return target


def draw(comparison: Comparison, folder: Path) -> Path:
    """Draw one comparison; return the file."""
    found = all_ratios(comparison, folder)
    lines = {
        line.label: [
            (_x(comparison, place), cell.ratio, cell.date < comparison.since)
            for place, cell in found[line.label].items()
        ]
        for line in comparison.lines
        if line.drawn
    }
    places = {place for label in lines for place in found[label]}
    along = {"part": "training step", "preset": ""}.get(comparison.along, "tokens")
    hollow = any(older for points in lines.values() for *_, older in points)
    note = "hollow: older runs, see the table" if hollow else ""
    chart = Chart(
        title=claim(comparison, found),
        axis=comparison.axis.rsplit(" (", 1)[0],
        along=f"{along}   {comparison.gpu}   {note}".strip(),
        lines=lines,
        ticks={_x(comparison, place): _tick(comparison, place) for place in places},
        low=comparison.low,
        percent=comparison.metric == "efficiency",
    )
    return chart.draw(folder / f"{comparison.name}.png")


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
