"""Charts of whole layers: time by length, parts of the time, memory of the core."""

import math
from pathlib import Path

from benchmarks.charts.drawing import (
    Point,
    draw_shares,
    machine,
    mark_lengths,
    of_one_gpu,
    pyplot,
    save,
    thousands,
)

#: Parts of a DSA layer's step -> operations of the trace; the last one has the rest.
GROUPS = {
    "projections": ("matrix products",),
    "index scores": ("indexer_scores",),
    "selection": ("indexer_topk",),
    "attention forward": ("sparse_attention_forward", "masked_attention_forward", "key_bits"),
    "attention backward": ("sparse_attention_backward", "masked_attention_backward"),
    "indexer loss and its backward": (
        "sparse_attention_probabilities", "masked_attention_probabilities", "sparse_indexer_loss",
    ),
    "rope, norms, copies": (),
}  # fmt: skip


#: Ways with a line in the chart of times.
CURVES = ("ours", "frozen", "dense", "bundled")


def draw_layers(points: list[Point], folder: Path) -> list[Path]:
    written = []
    for preset in dict.fromkeys(point.case["preset"] for point in points):
        mine = of_one_gpu([point for point in points if point.case["preset"] == preset])
        if preset == "core":
            written.append(draw_core(mine, folder / "layer_core_memory.png"))
            continue
        title = f"{preset}: an attention layer, "
        name = "layer" if preset == "v3.2" else f"layer_{preset}"
        if "ratio" not in mine[0].case:
            target = folder / f"{name}_time.png"
            written.append(
                draw_times(mine, f"{title}forward and backward\n{machine(mine)}", target)
            )
        if bars := layer_bars(mine):
            target, label = folder / f"{name}_shares.png", "share of the kernel time of a step, %"
            title += f"where the time goes\n{machine(mine)}"
            written.append(draw_shares(bars, label, title, target))
    return written


def step_times(points: list[Point], heads: int, way: str) -> dict[int, float]:
    found = {
        p.case["tokens"]: p.values["ms"] for p in points
        if (p.part, p.way, p.case.get("heads")) == ("step", way, heads)
    }  # fmt: skip
    return dict(sorted(found.items()))


def break_even(ours: dict[int, float], peer: dict[int, float]) -> float | None:
    """Return the number of tokens from which ours is not slower, ``None`` if there is none.

    ``ours``, ``peer``: tokens -> time. Interpolates the ratio of times as a power of the length. If
    ours is never slower, returns the shortest length.
    """
    lengths = sorted(set(ours) & set(peer))
    ratios = [peer[n] / ours[n] for n in lengths]
    slower = [place for place, ratio in enumerate(ratios) if ratio < 1]
    if not lengths or slower[-1:] == [len(lengths) - 1]:
        return None
    if not slower:
        return float(lengths[0])
    place = slower[-1]
    low, high = math.log(ratios[place]), math.log(ratios[place + 1])
    return lengths[place] * (lengths[place + 1] / lengths[place]) ** (-low / (high - low))


def draw_times(points: list[Point], title: str, target: Path) -> Path:
    """Draw time by length, a panel per number of heads, a line per way.

    Heads with a single length are omitted.
    """
    points = [point for point in points if not is_rank(point.way)]
    lengths: dict[int, set[int]] = {}
    for point in points:
        lengths.setdefault(point.case["heads"], set()).add(point.case["tokens"])
    most = max(map(len, lengths.values()))
    found_heads = sorted(
        (heads for heads, found in lengths.items() if len(found) > 1 or most == 1), reverse=True
    )
    ways = [way for way in CURVES if any(point.way == way for point in points)]
    figure, axes = pyplot.subplots(
        1, len(found_heads), figsize=(1 + 5 * len(found_heads), 5), squeeze=False, sharey=True
    )
    for axis, heads in zip(axes[0], found_heads, strict=True):
        ours = step_times(points, heads, "ours")
        for number, way in enumerate(ways):
            line = step_times(points, heads, way)
            if not line:
                continue  # nor a legend entry
            even = break_even(ours, line) if way == "dense" else None
            label = f"{way}, ours not slower from {even / 1024:.3g}k" if even else way
            axis.plot(list(line), list(line.values()), marker="o", color=f"C{number}", label=label)
        axis.set(title=f"{heads} heads", xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
        mark_lengths(axis, sorted({p.case["tokens"] for p in points}))
    return save(figure, title, target)


def is_rank(way: str) -> bool:
    return way.endswith("-rank")


def layer_bars(points: list[Point]) -> dict[str, dict[str, float]]:
    """Return label -> operation or group -> milliseconds of kernels per step.

    DSA layers are ordered by heads and tokens; labels mention masked dense attention in ``ours``.
    """
    bars: dict[str, dict[str, float]] = {}
    masked = {
        str(point.case) for point in points
        if (point.part, point.way) == ("step/masked_attention_forward", "ours")
    }  # fmt: skip
    points = sorted(points, key=_bar_order)
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    for point in points:
        top, _, operation = point.part.partition("/")
        ms = point.values.get("ms")
        if top != "step" or not operation or not ms:
            continue
        case, length = point.case, thousands(point.case["tokens"])
        if "ratio" in case:
            bars.setdefault(f"{length}, ratio {case['ratio']}, {point.way}", {})[operation] = ms
        else:
            if point.way == "dense-rank":  # its attention is no operation
                continue
            label = f"{case['heads']} heads, {length}"
            if point.way != "ours":
                label += f", {point.way}"
            elif str(case) in masked:
                label += ", masked"
            times = bars.setdefault(label, dict.fromkeys(GROUPS, 0.0))
            times[group_of.get(operation, list(GROUPS)[-1])] += ms
    return bars


def _bar_order(point: Point) -> tuple[int, int, bool]:
    """CSA layers stay in the order of their runs."""
    case = point.case
    if "ratio" in case:
        return 0, 0, False
    return -case["heads"], case["tokens"], point.way != "ours"


def draw_core(points: list[Point], target: Path) -> Path:
    """Draw peak memory by length, with the quadratic growth for comparison."""
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for workspace in sorted({point.case["workspace_mib"] for point in points}):
        mine = [point for point in points if point.case["workspace_mib"] == workspace]
        axis.plot([point.case["tokens"] for point in mine],
                  [point.values["peak_mib"] for point in mine], "o-",
                  label=f"peak, {workspace} MiB workspace")  # fmt: skip
    found = {point.case["tokens"]: point.values["results_mib"] for point in points}
    lengths = sorted(found)
    axis.plot(lengths, [found[n] for n in lengths], "k:", label="results and gradients alone")
    axis.plot(lengths, [n * n * 16 * 4 / 2**20 for n in lengths], "r--",
              label="one S x S score buffer per head")  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB above the inputs")
    mark_lengths(axis, lengths)
    return save(figure, "Core of a layer in torch, forward and backward", target)
