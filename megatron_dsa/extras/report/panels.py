"""The charts of a report, each drawn on an axis of matplotlib.

A run has one colour in all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib import ticker

from megatron_dsa.extras.report.events import RunLog, Series
from megatron_dsa.extras.report.facts import REST, compiled, settled, step_shares, tokens_per_second
from megatron_dsa.extras.report.lines import (
    GRAY,
    SEGMENTS,
    color_of,
    line,
    look_of,
    mark_stages,
    thinned,
)
from megatron_dsa.metrics.tags import FIGURES, MFU
from megatron_dsa.ops import OPERATIONS

MASS, LOSS = FIGURES["dsa attention mass captured"], FIGURES["indexer loss"]
OVERLAP = FIGURES["dsa query overlap"]
PERCENT = ticker.FuncFormatter(lambda share, _: f"{100 * share:.4g} %")


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: name of the chart.
        text: how to read it, one sentence.
        draw: draws the runs on an axis, returns whether there was anything.
        ylabel, xlabel: labels of the axes. A chart by step shows changes of the training stage.
        format: format of the numbers on the y axis.
        wide: as wide as the page.
    """

    title: str
    text: str
    draw: Callable[[Any, list[RunLog]], bool]
    ylabel: str = ""
    xlabel: str = "step"
    format: ticker.Formatter | None = None
    wide: bool = False

    def show(self, axis, runs: list[RunLog]) -> bool:
        """Draw the runs with labels and legend; return whether there was anything."""
        drawn = self.draw(axis, runs)
        axis.set(xlabel=self.xlabel, ylabel=self.ylabel)
        if self.format is not None:
            axis.yaxis.set_major_formatter(self.format)
        if drawn and len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False, fontsize=8)
        if drawn and self.xlabel == "step":
            mark_stages(axis, runs)
        return drawn


def validations(log: RunLog) -> dict[str, Series]:
    """Return the validation losses by the name of their set (empty for the only one)."""
    found = log.under("lm loss validation")
    return {
        name.removeprefix("-"): series
        for name, series in found.items()
        if not name.endswith((" vs samples", " ppl"))
    }


def draw_loss(axis, runs: list[RunLog]) -> bool:
    """Training loss as a thin line, validation loss with points."""
    drawn = []
    for number, run in enumerate(runs):
        look, sets = look_of(number), validations(run)
        training = run.scalars.get("lm loss", [])
        faint = 0.35 if sets else 1.0
        label = None if sets else run.name
        drawn.append(line(axis, training, **look, lw=1, alpha=faint, label=label))
        for name, series in sets.items():
            label = " ".join(filter(None, (run.name, "validation", name)))
            drawn.append(line(axis, series, **look, lw=1.6, marker="o", ms=3, label=label))
    later = [value for run in runs for value in _later(run.scalars.get("lm loss", []))]
    if later:  # losses of an untrained model would flatten the rest
        room = 0.05 * (max(later) - min(later)) or 0.1
        axis.set_ylim(top=max(later) + room)
    return any(drawn)


def _later(series: Series) -> list[float]:
    """Return the finite values after the first tenth."""
    return [value for _, value in series[len(series) // 10 + 1 :] if math.isfinite(value)]


def draw_difference(axis, runs: list[RunLog]) -> bool:
    """Validation loss minus that of the first run, at the steps where both were evaluated."""
    base, drawn = validations(runs[0]), []
    for number, run in enumerate(runs[1:], 1):
        for name, series in validations(run).items():
            reference = dict(base.get(name, ()))
            apart = [(s, value - reference[s]) for s, value in series if s in reference]
            label = " ".join(filter(None, (run.name, name)))
            drawn.append(
                line(axis, apart, **look_of(number), lw=1.4, marker="o", ms=3, label=label)
            )
    if any(drawn):
        axis.axhline(0, color=color_of(0), lw=1.2, label=runs[0].name)
    return any(drawn)


def draw_layers(axis, runs: list[RunLog], tag: str, yscale: str = "linear") -> bool:
    """One run: a line per layer. Several: the mean over layers of each, and the layers' range.

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
                drawn.append(line(axis, series, breaks, color=shades(place), lw=1.1, label=label))
            continue
        if len(layers) > 1:
            curves = [dict(thinned(series, breaks=breaks)) for series in layers.values()]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            low, high = ([edge(c[s] for c in curves) for s in steps] for edge in (min, max))
            axis.fill_between(steps, low, high, color=color_of(number), alpha=0.15, lw=0)
        series = run.scalars.get(tag, [])
        drawn.append(line(axis, series, breaks, **look_of(number), lw=1.5, label=run.name))
    if any(drawn):
        axis.set_yscale(yscale)
    return any(drawn)


def draw_by_layer(axis, runs: list[RunLog], tag: str) -> bool:
    """Median of a figure's last values over the number of the layer."""
    drawn = []
    for number, run in enumerate(runs):
        ends = [(layer, settled(series[-20:])) for layer, series in run.layers(tag).items()]
        drawn.append(bool(ends))
        if ends:
            look = look_of(number)
            axis.plot(*zip(*ends, strict=True), marker="o", ms=4, lw=1.2, **look, label=run.name)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return any(drawn)


def draw_shares(axis, runs: list[RunLog]) -> bool:
    """A bar of milliseconds per run, cut into operations; large parts carry their share.

    Operations that were measured to take longer than the step say so beside the bar.
    """
    bars = {run.name: shares for run in runs if (shares := step_shares(run))}
    if not bars:
        return False
    names = list(dict.fromkeys(name for shares in bars.values() for name in shares if name != REST))
    names.append(REST)
    # An operation has its colour in every report.
    order = [name.replace("_", " ") for name in OPERATIONS]
    order += [name for name in names if name not in order]
    colors = {name: SEGMENTS[order.index(name) % len(SEGMENTS)] for name in names[:-1]}
    colors[REST] = GRAY
    longest = max(sum(shares.values()) for shares in bars.values())
    labels = []
    for place, (run_name, shares) in enumerate(bars.items()):
        left, total = 0.0, sum(shares.values())
        over = -shares[REST] / total
        said = f"\nmeasured {100 * (1 + over):.4g} % of the step" if over > 0.001 else ""
        labels.append(run_name + said)
        for name, seconds in shares.items():
            if name == REST and over > 0:
                continue
            width = 1e3 * seconds
            axis.barh(place, width, left=1e3 * left, height=0.62, color=colors[name], lw=0)
            if seconds > 0.045 * longest:
                middle = 1e3 * left + width / 2
                said = f"{100 * seconds / total:.0f} %"
                axis.text(middle, place, said, ha="center", va="center", size=8, color="#111111")
            left += seconds
    handles = [matplotlib.patches.Patch(color=colors[name], label=name) for name in names]
    axis.figure.legend(
        handles=handles, frameon=False, fontsize=8, ncols=4, loc="outside lower center"
    )
    axis.set_yticks(range(len(bars)), labels)
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return True


def draw_from_zero(axis, runs: list[RunLog], series_of: Callable[[RunLog], Series]) -> bool:
    """A line per run on an axis that begins at 0."""
    drawn = [
        line(axis, series_of(run), **look_of(number), lw=1.4, label=run.name)
        for number, run in enumerate(runs)
    ]
    if any(drawn):
        axis.set_ylim(bottom=0)
    return any(drawn)


def speed(run: RunLog) -> Series:
    """Return tokens per second, without compilation."""
    return compiled(run, tokens_per_second(run))


def draw_throughput(axis, runs: list[RunLog]) -> bool:
    """TFLOP/s; the share of the peak on the right, where it is known."""
    drawn = draw_from_zero(axis, runs, lambda run: compiled(run, run.scalars.get("throughput", [])))
    peaks = {
        round(speed / share)
        for run in runs
        if (share := settled(run.scalars.get(MFU, [])))
        and (speed := settled(run.scalars.get("throughput", [])))
    }
    if len(peaks) == 1:  # runs on different GPUs have no axis in common
        (peak,) = peaks
        right = axis.secondary_yaxis("right", functions=(lambda y: y / peak, lambda y: y * peak))
        right.yaxis.set_major_formatter(PERCENT)
        right.set_ylabel("MFU")
    return drawn


def memory(run: RunLog) -> Series:
    """Return the peak of allocated memory in GiB."""
    return [(step, n / 2**30) for step, n in run.scalars.get("mem-max-allocated-bytes", [])]


PANELS = (
    Panel(
        "Language-model loss",
        "Training (faint) and validation (points); the start may lie above.",
        draw_loss,
        "loss (nats per token)",
    ),
    Panel(
        "Difference in validation loss",
        "To the first run at the same step number; above 0 is worse. The runs may have started "
        "from different weights.",
        draw_difference,
        "difference (nats per token)",
    ),
    Panel(
        "Indexer loss",
        "How far the indexer is from the attention that it learns; the band spans the layers.",
        partial(draw_layers, tag=LOSS, yscale="log"),
        "indexer loss (KL, nats)",
    ),
    Panel(
        "Attention mass captured",
        "Share of dense attention's probability on the selected keys; falls when the indexer "
        "loses track.",
        partial(draw_layers, tag=MASS),
        "attention mass captured",
        format=PERCENT,
    ),
    Panel(
        "Indexer loss by layer",
        "Median of the last values.",
        partial(draw_by_layer, tag=LOSS),
        "indexer loss (KL, nats)",
        "layer",
    ),
    Panel(
        "Mass captured by layer",
        "Median of the last values.",
        partial(draw_by_layer, tag=MASS),
        "attention mass captured",
        "layer",
        PERCENT,
    ),
    Panel(
        "Overlap of selections",
        "Keys that the query before selected as well.",
        partial(draw_layers, tag=OVERLAP),
        "keys in common",
        format=PERCENT,
    ),
    Panel(
        "Speed",
        "Tokens per second of the whole job, but for what is logged first after a start, which "
        "holds compilation.",
        partial(draw_from_zero, series_of=speed),
        "tokens per second",
        format=ticker.EngFormatter(sep=" "),
    ),
    Panel(
        "Throughput",
        "Matrix products that the mathematics asks for, per GPU, from the same steps.",
        draw_throughput,
        "TFLOP/s per GPU",
    ),
    Panel(
        "Memory",
        "Peak of what torch allocated, on the rank that writes the log.",
        partial(draw_from_zero, series_of=memory),
        "GiB",
    ),
    Panel(
        "Where a step's time goes",
        "Operations as timed where they are dispatched, in the last stage; what autograd runs on "
        "its own is in the rest.",
        draw_shares,
        xlabel="time of a step (ms)",
        wide=True,
    ),
)  # fmt: skip
