"""The charts of a report, each drawn on an axis of matplotlib.

A run has one colour in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib import ticker

from megatron_dsa.metrics.tags import FIGURES, MFU
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.tools.report.events import RunLog, Series
from megatron_dsa.tools.report.facts import REST, compiled, settled, step_shares, tokens_per_second
from megatron_dsa.tools.report.lines import (
    GRAY,
    SEGMENTS,
    by_step,
    color_of,
    line,
    style_of,
    thinned,
)

MASS, LOSS = FIGURES["dsa attention mass captured"], FIGURES["indexer loss"]
PERCENT = ticker.FuncFormatter(lambda share, _: f"{100 * share:.4g} %")


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: what is shown, with its unit.
        text: how to read it, one sentence.
        draw: draws the runs on an axis, returns whether there was anything.
        wide: as wide as the page.
    """

    title: str
    text: str
    draw: Callable[[object, list[RunLog]], bool]
    wide: bool = False


def _finish(axis, ylabel: str, drawn: Iterable[bool], percent: bool = False) -> bool:
    some = any(list(drawn))
    axis.set(xlabel="step", ylabel=ylabel)
    if percent:
        axis.yaxis.set_major_formatter(PERCENT)
    if some and len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(frameon=False, fontsize=8)
    return some


def _lines(axis, runs: list[RunLog], series_of: Callable[[RunLog], Series]) -> list[bool]:
    return [
        line(
            axis, series_of(run), color=color_of(number), ls=style_of(number), lw=1.4,
            label=run.name,
        )
        for number, run in enumerate(runs)
    ]  # fmt: skip


def validations(log: RunLog) -> dict[str, Series]:
    """Return the validation losses by the name of their set (empty for the only one)."""
    found = log.under("lm loss validation")
    return {
        name.removeprefix("-"): series
        for name, series in found.items()
        if not name.endswith((" vs samples", " ppl"))
    }


@by_step
def draw_loss(axis, runs: list[RunLog]) -> bool:
    """Training loss as a thin line, validation loss with points."""
    drawn = []
    for number, run in enumerate(runs):
        color, style = color_of(number), style_of(number)
        sets = validations(run)
        training = run.scalars.get("lm loss", [])
        faint = 0.35 if sets else 1.0
        label = None if sets else run.name
        drawn.append(line(axis, training, color=color, ls=style, lw=1, alpha=faint, label=label))
        for name, series in sets.items():
            label = " ".join(filter(None, (run.name, "validation", name)))
            drawn.append(
                line(axis, series, color=color, ls=style, lw=1.6, marker="o", ms=3, label=label)
            )
    later = [value for run in runs for value in _later(run.scalars.get("lm loss", []))]
    if later:  # what a model has before it has learnt anything would flatten all the rest
        room = 0.05 * (max(later) - min(later)) or 0.1
        axis.set_ylim(top=max(later) + room)
    return _finish(axis, "loss (nats per token)", drawn)


def _later(series: Series) -> list[float]:
    """The finite values after the first tenth."""
    return [value for _, value in series[len(series) // 10 + 1 :] if math.isfinite(value)]


@by_step
def draw_difference(axis, runs: list[RunLog]) -> bool:
    """Validation loss minus that of the first run, at the steps where both were evaluated."""
    base, drawn = validations(runs[0]), []
    for number, run in enumerate(runs[1:], 1):
        for name, series in validations(run).items():
            reference = dict(base.get(name, ()))
            apart = [(s, value - reference[s]) for s, value in series if s in reference]
            label = " ".join(filter(None, (run.name, name)))
            style: dict[str, Any] = {"color": color_of(number), "label": label}
            style["ls"] = style_of(number)
            drawn.append(line(axis, apart, lw=1.4, marker="o", ms=3, **style))
    if any(drawn):
        axis.axhline(0, color=color_of(0), lw=1.2, label=runs[0].name)
    return _finish(axis, "difference (nats per token)", drawn)


def _draw_layers(axis, runs: list[RunLog], tag: str) -> bool:
    """Of one run a line per layer; of several their means over layers, and the layers' range.

    A line ends with its stage: another one measures over other keys.
    """
    drawn = []
    for number, run in enumerate(runs):
        layers = run.layers(tag)
        breaks = [step for step, _ in run.stages()]
        if len(runs) == 1:
            shades = matplotlib.colormaps["viridis"].resampled(max(len(layers), 2))
            for place, (layer, series) in enumerate(layers.items()):
                shown = len(layers) <= 8 or layer in (min(layers), max(layers))
                label = f"layer {layer}" if shown else None
                style = {"color": shades(place), "lw": 1.1, "label": label}
                drawn.append(line(axis, series, breaks, **style))
            continue
        color = color_of(number)
        if len(layers) > 1:
            curves = [dict(thinned(series, breaks=breaks)) for series in layers.values()]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            low, high = ([edge(c[s] for c in curves) for s in steps] for edge in (min, max))
            axis.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
        series = run.scalars.get(tag, [])
        style = {"color": color, "ls": style_of(number), "lw": 1.5, "label": run.name}
        drawn.append(line(axis, series, breaks, **style))
    return any(drawn)


@by_step
def draw_indexer_loss(axis, runs: list[RunLog]) -> bool:
    drawn = _draw_layers(axis, runs, LOSS)
    if drawn:
        axis.set_yscale("log")
    return _finish(axis, "indexer loss (KL, nats)", [drawn])


@by_step
def draw_mass(axis, runs: list[RunLog]) -> bool:
    return _finish(axis, "attention mass captured", [_draw_layers(axis, runs, MASS)], True)


def _draw_by_layer(axis, runs: list[RunLog], tag: str) -> bool:
    drawn = []
    for number, run in enumerate(runs):
        ends = {layer: settled(series[-20:]) for layer, series in run.layers(tag).items()}
        style = {"color": color_of(number), "ls": style_of(number), "label": run.name}
        drawn.append(bool(ends))
        if ends:
            axis.plot(list(ends), list(ends.values()), marker="o", ms=4, lw=1.2, **style)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return any(drawn)


def draw_loss_by_layer(axis, runs: list[RunLog]) -> bool:
    drawn = _finish(axis, "indexer loss (KL, nats)", [_draw_by_layer(axis, runs, LOSS)])
    axis.set_xlabel("layer")
    return drawn


def draw_mass_by_layer(axis, runs: list[RunLog]) -> bool:
    drawn = _draw_by_layer(axis, runs, MASS)
    _finish(axis, "attention mass captured", [drawn], True)
    axis.set_xlabel("layer")
    return drawn


def _draw_pair(axis, runs: list[RunLog], names: tuple[str, str], ylabel: str) -> bool:
    """Two figures: the first as full, the second as dashed lines."""
    drawn = []
    for number, run in enumerate(runs):
        for name, style in zip(names, ("-", "--"), strict=True):
            figure = name.removeprefix("dsa ")
            # Of several runs, the legend tells the colours.
            label = figure if len(runs) == 1 else (run.name if style == "-" else None)
            look: dict[str, Any] = {"color": color_of(number), "ls": style, "lw": 1.3}
            look["label"] = label
            drawn.append(line(axis, run.scalars.get(FIGURES[name], []), **look))
    return _finish(axis, ylabel, drawn, True)


@by_step
def draw_ties(axis, runs: list[RunLog]) -> bool:
    names = ("dsa boundary ties", "dsa zero scores")
    return _draw_pair(axis, runs, names, "share")


@by_step
def draw_overlap(axis, runs: list[RunLog]) -> bool:
    names = ("dsa query overlap", "dsa layer overlap")
    return _draw_pair(axis, runs, names, "keys in common")


def draw_shares(axis, runs: list[RunLog]) -> bool:
    """A bar of milliseconds per run, cut into operations; large parts carry their share.

    Operations that were measured to take longer than the step say so beside the bar.
    """
    bars = {run.name: shares for run in runs if (shares := step_shares(run))}
    if not bars:
        return False
    names = list(dict.fromkeys(share.name for shares in bars.values() for share in shares[:-1]))
    names.append(REST)
    # An operation has its colour in every report.
    order = [name.replace("_", " ") for name in OPERATIONS]
    order += [name for name in names if name not in order]
    colors = {name: SEGMENTS[order.index(name) % len(SEGMENTS)] for name in names[:-1]}
    colors[REST] = GRAY
    longest = max(sum(share.seconds for share in shares) for shares in bars.values())
    labels = []
    for place, shares in enumerate(bars.values()):
        left, total = 0.0, sum(share.seconds for share in shares)
        over = -shares[-1].seconds / total
        said = f"\nmeasured {100 * (1 + over):.4g} % of the step" if over > 0.001 else ""
        labels.append(list(bars)[place] + said)
        for share in shares if over <= 0 else shares[:-1]:
            width = 1e3 * share.seconds
            axis.barh(place, width, left=1e3 * left, height=0.62, color=colors[share.name], lw=0)
            if share.seconds > 0.045 * longest:
                middle = 1e3 * left + width / 2
                said = f"{100 * share.seconds / total:.0f} %"
                axis.text(middle, place, said, ha="center", va="center", size=8, color="#111111")
            left += share.seconds
    handles = [matplotlib.patches.Patch(color=colors[name], label=name) for name in names]
    axis.figure.legend(
        handles=handles, frameon=False, fontsize=8, ncols=4, loc="outside lower center"
    )
    axis.set_yticks(range(len(bars)), labels)
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.set_xlabel("time of a step (ms)")
    axis.grid(axis="y", visible=False)
    return True


@by_step
def draw_speed(axis, runs: list[RunLog]) -> bool:
    drawn = _lines(axis, runs, lambda run: compiled(run, tokens_per_second(run)))
    axis.yaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
    if any(drawn):
        axis.set_ylim(bottom=0)
    return _finish(axis, "tokens per second", drawn)


@by_step
def draw_throughput(axis, runs: list[RunLog]) -> bool:
    """TFLOP/s; the share of the peak on the right, where it is known."""
    drawn = _lines(axis, runs, lambda run: compiled(run, run.scalars.get("throughput", [])))
    peaks = {
        round(speed / share)
        for run in runs
        if (share := settled(run.scalars.get(MFU, [])))
        and (speed := settled(run.scalars.get("throughput", [])))
    }
    if any(drawn):
        axis.set_ylim(bottom=0)
    if len(peaks) == 1:  # runs on different GPUs have no axis in common
        (peak,) = peaks
        right = axis.secondary_yaxis("right", functions=(lambda y: y / peak, lambda y: y * peak))
        right.yaxis.set_major_formatter(PERCENT)
        right.set_ylabel("MFU")
    return _finish(axis, "TFLOP/s per GPU", drawn)


@by_step
def draw_memory(axis, runs: list[RunLog]) -> bool:
    def gigabytes(run: RunLog) -> Series:
        series = run.scalars.get("mem-max-allocated-bytes", [])
        return [(step, value / 2**30) for step, value in series]

    drawn = _lines(axis, runs, gigabytes)
    if any(drawn):
        axis.set_ylim(bottom=0)
    return _finish(axis, "GiB", drawn)


PANELS = (
    Panel(
        "Language-model loss",
        "Training (faint) and validation (points); the start may lie above.",
        draw_loss,
    ),
    Panel(
        "Difference in validation loss",
        "To the first run at the same step number; above 0 is worse. The runs may have started "
        "from different weights.",
        draw_difference,
    ),
    Panel(
        "Indexer loss",
        "How far the indexer is from the attention that it learns; the band spans the layers.",
        draw_indexer_loss,
    ),
    Panel(
        "Attention mass captured",
        "Share of dense attention's probability on the selected keys; falls when the indexer "
        "loses track.",
        draw_mass,
    ),
    Panel("Indexer loss by layer", "Median of the last values.", draw_loss_by_layer),
    Panel("Mass captured by layer", "Median of the last values.", draw_mass_by_layer),
    Panel(
        "Ties",
        "Rows whose last selected score equals a rejected one (line), and index scores that are "
        "exactly 0 (dashed): where there are many, ties decide.",
        draw_ties,
    ),
    Panel(
        "Overlap of selections",
        "Keys that the query before (line) or the layer before (dashed) selected as well.",
        draw_overlap,
    ),
    Panel(
        "Speed",
        "Tokens per second of the whole job, but for what is logged first after a start, which "
        "holds compilation.",
        draw_speed,
    ),
    Panel(
        "Throughput",
        "Matrix products that the mathematics asks for, per GPU, from the same steps.",
        draw_throughput,
    ),
    Panel("Memory", "Peak of what torch allocated, on the rank that writes the log.", draw_memory),
    Panel(
        "Where a step's time goes",
        "Operations as timed where they are dispatched, in the last stage; what autograd runs on "
        "its own is in the rest.",
        draw_shares,
        wide=True,
    ),
)  # fmt: skip
