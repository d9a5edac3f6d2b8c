"""The charts of a report, drawn on matplotlib axes."""

import itertools
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib import ticker

from megatron_dsa.extras.report.events import RunLog, Series
from megatron_dsa.extras.report.facts import compiled, tokens_per_second
from megatron_dsa.metrics.tags import FIGURES

#: Line colours readable on light and dark pages, also for most colour-blind people.
COLORS = (
    "#2b7bba", "#e08214", "#1b9e77", "#c2539d", "#d6483b", "#7b6fd0", "#8f7a2f", "#3aa6b9",
)  # fmt: skip
_GRAY = "#9aa0a6"
_PERCENT = ticker.FuncFormatter(lambda share, _: f"{100 * share:.4g} %")


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _look_of(number: int) -> dict[str, Any]:
    style = ("-", "--", ":", "-.")[number // len(COLORS) % 4]
    return {"color": color_of(number), "ls": style}


@dataclass(frozen=True)
class Panel:
    """One chart over steps; ``draw`` returns False if the runs lack data."""

    title: str
    text: str
    draw: Callable[[Any, list[RunLog]], bool]
    ylabel: str
    format: ticker.Formatter | None = None

    def show(self, axis, runs: list[RunLog]) -> bool:
        drawn = self.draw(axis, runs)
        axis.set(xlabel="step", ylabel=self.ylabel)
        if self.format is not None:
            axis.yaxis.set_major_formatter(self.format)
        if axis.get_yscale() == "log":  # page.py disables math text
            axis.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1, 0.4)))
        if drawn:
            if len(axis.get_legend_handles_labels()[1]) > 1:
                axis.legend(frameon=False, fontsize=8)
            _mark_stages(axis, runs)
        return drawn


def _mark_stages(axis, runs: list[RunLog]) -> None:
    low, high = axis.get_xlim()
    single = len(runs) == 1
    for number, run in enumerate(runs):
        for step, stage in run.stages()[1:]:
            if not low <= step <= high:
                continue
            axis.axvline(step, color=_GRAY if single else color_of(number), ls=":", lw=1)
            if single:
                axis.annotate(
                    stage, (step, 1), (2, -2), xycoords=axis.get_xaxis_transform(),
                    textcoords="offset points", va="top", size=7,
                )  # fmt: skip


def thinned(
    series: Series, points: int = 400, breaks: Sequence[int] = ()
) -> list[tuple[float, float]]:
    """Average a series down to about ``points``; NaN interrupts the line at ``breaks``."""
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


def _line(axis, series: Series, breaks: Sequence[int] = (), **style) -> bool:
    if series:
        axis.plot(*zip(*thinned(series, breaks=breaks), strict=True), **style)
    return bool(series)


def validations(log: RunLog) -> dict[str, Series]:
    """Return validation losses by data set ("" for a single one)."""
    found = log.under("lm loss validation")
    return {
        name.removeprefix("-"): series
        for name, series in found.items()
        if not name.endswith((" vs samples", " ppl"))
    }


def smoothed(series: Series) -> Series:
    """Return exponential moving averages over 1/20 of a series, skipping NaN."""
    keep = 1 - 1 / max(2, len(series) / 20)
    means: Series = []
    total = weight = 0.0
    for step, value in series:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
            means.append((step, total / weight))
    return means


def draw_loss(axis, runs: list[RunLog]) -> bool:
    drawn = []
    for number, run in enumerate(runs):
        look, training = _look_of(number), run.scalars.get("lm loss", [])
        drawn.append(_line(axis, training, **look, lw=0.8, alpha=0.35))
        drawn.append(_line(axis, smoothed(training), **look, lw=1.6, label=run.name))
        for name, series in validations(run).items():
            label = " ".join(filter(None, (run.name, "validation", name)))
            look = {"color": color_of(number), "ls": "none", "marker": "o", "ms": 4}
            drawn.append(_line(axis, series, **look, label=label))
    later = [value for run in runs for value in _later(run.scalars.get("lm loss", []))]
    if later:  # high first losses would flatten the curve
        room = 0.05 * (max(later) - min(later)) or 0.1
        axis.set_ylim(top=max(later) + room)
    return any(drawn)


def _later(series: Series) -> list[float]:
    return [value for _, value in series[len(series) // 10 + 1 :] if math.isfinite(value)]


def _draw_layers(axis, runs: list[RunLog], tag: str, yscale: str = "linear") -> bool:
    """Draw the layers of one run, or mean and range of several runs; break lines between stages."""
    drawn = []
    for number, run in enumerate(runs):
        layers = run.layers(tag)
        breaks = [step for step, _ in run.stages()]
        if len(runs) == 1:
            shades = matplotlib.colormaps["viridis"].resampled(max(len(layers), 2))
            for index, (layer, series) in enumerate(layers.items()):
                shown = len(layers) <= 8 or layer in (min(layers), max(layers))
                label = f"layer {layer}" if shown else None
                drawn.append(_line(axis, series, breaks, color=shades(index), lw=1.1, label=label))
            continue
        if len(layers) > 1:
            curves = [dict(thinned(series, breaks=breaks)) for series in layers.values()]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            low, high = ([edge(c[s] for c in curves) for s in steps] for edge in (min, max))
            axis.fill_between(steps, low, high, color=color_of(number), alpha=0.15, lw=0)
        series = run.scalars.get(tag, [])
        drawn.append(_line(axis, series, breaks, **_look_of(number), lw=1.5, label=run.name))
    if any(drawn):
        axis.set_yscale(yscale)
    return any(drawn)


def _draw_tag(
    axis, runs: list[RunLog], tag: str, smooth: bool = False, yscale: str = "linear"
) -> bool:
    drawn = []
    for number, run in enumerate(runs):
        look, series = _look_of(number), run.scalars.get(tag, [])
        if smooth:
            _line(axis, series, **look, lw=0.8, alpha=0.35)
            series = smoothed(series)
        drawn.append(_line(axis, series, **look, lw=1.5, label=run.name))
    if any(drawn):
        axis.set_yscale(yscale)
    return any(drawn)


def _draw_from_zero(axis, runs: list[RunLog], series_of: Callable[[RunLog], Series]) -> bool:
    drawn = [
        _line(axis, series_of(run), **_look_of(number), lw=1.4, label=run.name)
        for number, run in enumerate(runs)
    ]
    if any(drawn):
        axis.set_ylim(bottom=0)
    return any(drawn)


def _speed(run: RunLog) -> Series:
    return compiled(run, tokens_per_second(run))


def _memory(run: RunLog) -> Series:
    return [(step, n / 2**30) for step, n in run.scalars.get("mem-max-allocated-bytes", [])]


PANELS = (
    Panel(
        "Language-model loss",
        "Training as logged (faint) and smoothed, validation (points); the start may lie above.",
        draw_loss,
        "loss (nats per token)",
    ),
    Panel(
        "Indexer loss",
        "How far the indexer is from the attention that it learns; the band spans the layers.",
        partial(_draw_layers, tag=FIGURES["indexer loss"], yscale="log"),
        "indexer loss (KL, nats)",
        ticker.StrMethodFormatter("{x:g}"),
    ),
    Panel(
        "Attention mass captured",
        "Share of dense attention's probability on the selected keys; falls when the indexer "
        "loses track.",
        partial(_draw_layers, tag=FIGURES["dsa attention mass captured"]),
        "attention mass captured",
        _PERCENT,
    ),
    Panel(
        "Learning rate",
        "By the schedule; parts of a model may have other rates.",
        partial(_draw_tag, tag="learning-rate"),
        "learning rate",
    ),
    Panel(
        "Gradient norm",
        "Before clipping, as logged (faint) and smoothed.",
        partial(_draw_tag, tag="grad-norm", smooth=True, yscale="log"),
        "gradient norm",
        ticker.StrMethodFormatter("{x:g}"),
    ),
    Panel(
        "Speed",
        "Tokens per second of the whole job, but for what is logged first after a start, which "
        "holds compilation.",
        partial(_draw_from_zero, series_of=_speed),
        "tokens per second",
        ticker.EngFormatter(sep=" "),
    ),
    Panel(
        "Memory",
        "Peak of what torch allocated, on the rank that writes the log.",
        partial(_draw_from_zero, series_of=_memory),
        "GiB",
    ),
)
