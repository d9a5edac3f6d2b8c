"""Lines of a report's charts: their looks, their points, and where a stage of training begins.

Lines of many points show means of equal stretches of steps. Dotted lines are where a run's stage
of training changes.
"""

import itertools
import math
from bisect import bisect
from collections.abc import Sequence
from typing import Any

from megatron_dsa.extras.report.events import RunLog, Series

#: Readable on white and on dark ground, and by most colour-blind people.
COLORS = (
    "#2b7bba", "#e08214", "#1b9e77", "#c2539d", "#d6483b", "#7b6fd0", "#8f7a2f", "#3aa6b9",
)  # fmt: skip
#: Segments of a bar, in the order of the operations.
SEGMENTS = (
    "#2b7bba", "#7fb3dc", "#e08214", "#f3bd77", "#1b9e77", "#83cbb3", "#c2539d", "#e0a3cc",
    "#7b6fd0", "#b9b2e6", "#8f7a2f", "#cdbd80", "#3aa6b9", "#99d3dd", "#d6483b",
)  # fmt: skip
#: The rest of a bar.
GRAY = "#9aa0a6"


def color_of(number: int) -> str:
    """Colour of a report's run ``number``."""
    return COLORS[number % len(COLORS)]


def look_of(number: int) -> dict[str, Any]:
    """Colour and line style of run ``number``: where colours repeat, the style changes."""
    style = ("-", "--", ":", "-.")[number // len(COLORS) % 4]
    return {"color": color_of(number), "ls": style}


def thinned(
    series: Series, points: int = 400, breaks: Sequence[int] = ()
) -> list[tuple[float, float]]:
    """Return about ``points`` means of equal stretches of a series.

    Args:
        breaks: steps, in ascending order, before which a line is to end: no mean reaches across,
            and a value that is no number keeps matplotlib from drawing through.
    """
    stretch = -(-len(series) // points)
    means: list[tuple[float, float]] = []
    for _, part in itertools.groupby(series, key=lambda point: bisect(breaks, point[0])):
        piece = list(part)
        if means:
            means.append((piece[0][0] - 0.5, math.nan))
        for start in range(0, len(piece), stretch):
            block = piece[start : start + stretch]
            means.append((block[-1][0], sum(value for _, value in block) / len(block)))
    return means


def line(axis, series: Series, breaks: Sequence[int] = (), **style) -> bool:
    """Draw a series; return whether it holds anything."""
    if series:
        axis.plot(*zip(*thinned(series, breaks=breaks), strict=True), **style)
    return bool(series)


def mark_stages(axis, runs: list[RunLog]) -> None:
    """Show where the stage of training changes; with one run, also to which."""
    low, high = axis.get_xlim()
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        for step, stage in run.stages()[1:]:
            if not low <= step <= high:
                continue
            axis.axvline(step, color=GRAY if alone else color_of(number), ls=":", lw=1)
            if alone:
                axis.annotate(
                    stage, (step, 1), (2, -2), xycoords=axis.get_xaxis_transform(),
                    textcoords="offset points", va="top", size=7,
                )  # fmt: skip
