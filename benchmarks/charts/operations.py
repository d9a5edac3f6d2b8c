"""Charts of single operations: sparse attention, and V4's memory-bound pieces."""

from pathlib import Path

from benchmarks.attention.shapes import PRESETS
from benchmarks.charts.drawing import (
    Point,
    machine,
    mark_lengths,
    of_one_gpu,
    pyplot,
    save,
    thousands,
)
from benchmarks.masked.shapes import PAIR_DIMS as MASKED_PAIR_DIMS
from benchmarks.masked.shapes import PEERS as MASKED_PEERS

LINE_STYLES = ("-", "--", ":", "-.")


def draw_attention(points: list[Point], folder: Path) -> list[Path]:
    written = []
    for name in dict.fromkeys(point.case["preset"] for point in points):
        mine = of_one_gpu([point for point in points if point.case["preset"] == name])
        p = PRESETS[name]
        title = (
            f"{name}: {p.heads} heads, dims {p.qk_dim}/{p.v_dim}, K = {p.topk}, "
            f"{mine[-1].case['queries']} queries\n{machine(mine)}"
        )
        if any(point.part in ("forward", "backward") for point in mine):
            written.append(draw_speed(mine, title, folder / f"attention_{name}_tflops.png"))
    return written


def draw_speed(points: list[Point], title: str, target: Path) -> Path:
    """Draw TFLOP/s by number of keys, one line per way and index distribution."""
    parts = [name for name in ("forward", "backward") if any(p.part == name for p in points)]
    ways = list(dict.fromkeys(point.way for point in points if point.part in parts))
    figure, axes = pyplot.subplots(
        1, len(parts), figsize=(6 * len(parts), 5), squeeze=False, sharey=True
    )
    for axis, part in zip(axes[0], parts, strict=True):
        draw_lines(axis, points, part, "skv", {way: way for way in ways})
        axis.set(title=part, xlabel="keys")
    axes[0][0].set_ylim(bottom=0)  # of all panels, after all lines
    return save(figure, title, target)


def draw_lines(axis, points: list[Point], part: str, length: str, ways: dict[str, str]) -> None:
    """Draw TFLOP/s of a part, one line per way and index distribution.

    ``length``: the case's field of the x axis; ``ways``: way -> label.
    """
    kinds = list(dict.fromkeys(point.case["distribution"] for point in points))
    for number, (way, label) in enumerate(ways.items()):
        for style, kind in enumerate(kinds):
            line = {
                point.case[length]: point.values["tflops"] for point in points
                if (point.part, point.way, point.case["distribution"]) == (part, way, kind)
            }  # fmt: skip
            if line:
                axis.plot(
                    sorted(line), [line[n] for n in sorted(line)], marker="o",
                    color=f"C{number}", linestyle=LINE_STYLES[style % len(LINE_STYLES)],
                    label=f"{label}, {kind}",
                )  # fmt: skip
    if peaks := sorted(point.values["tflops"] for point in points if point.part == "gemm"):
        peak = peaks[len(peaks) // 2]
        axis.axhline(peak, color="k", linewidth=1, label=f"bf16 GEMM, {peak:.3g} TFLOP/s")
    axis.set(ylabel="TFLOP/s", xscale="log")
    mark_lengths(axis, sorted({point.case[length] for point in points}))


def draw_masked(points: list[Point], folder: Path) -> list[Path]:
    """Draw masked dense attention, panels by dims and heads."""
    points = of_one_gpu(points)
    found = [point for point in points if point.part in MASKED_PAIR_DIMS]
    if not found:
        return []
    parts = [part for part in MASKED_PAIR_DIMS if any(point.part == part for point in found)]
    rows = sorted({_heads_and_dims(point) for point in found}, key=lambda x: (x[1:], -x[0]))
    ways = {p.way: MASKED_PEERS.get(p.way, p.way) for p in found}
    size = (6 * len(parts), 1 + 4 * len(rows))
    figure, axes = pyplot.subplots(
        len(rows), len(parts), figsize=size, squeeze=False, sharey=True
    )  # fmt: skip
    for row, line in zip(rows, axes, strict=True):
        mine = [point for point in points if _heads_and_dims(point) == row]
        label = "{} heads, dims {}/{}".format(*row)
        for part, axis in zip(parts, line, strict=True):
            draw_lines(axis, mine, part, "tokens", ways)
            axis.set(title=f"{part}, {label}", xlabel="tokens of a causal sequence")
    axes[0][0].set_ylim(bottom=0)
    title = f"Masked dense attention, FLOP of all visible pairs\n{machine(points)}"
    return [save(figure, title, folder / "masked_tflops.png")]


def _heads_and_dims(point: Point) -> tuple[int, int, int]:
    """Return heads, key dim and value dim."""
    case = point.case
    return case["heads"], case["nope"] + case["rope"], case["v"]


def draw_csa(points: list[Point], folder: Path) -> list[Path]:
    title = "Memory-bound operations of V4's attention"
    return [draw_shares_of_copy(points, title, folder / "csa_pieces.png")]


def draw_connections(points: list[Point], folder: Path) -> list[Path]:
    written = []
    for name in dict.fromkeys(point.case["preset"] for point in points):
        mine = [point for point in points if point.case["preset"] == name]
        title = f"Hyper-connections of {name}, four streams"
        written.append(draw_shares_of_copy(mine, title, folder / f"connections_{name}.png"))
    return written


def draw_shares_of_copy(points: list[Point], title: str, target: Path) -> Path:
    """Draw the share of the copy bandwidth, one panel per length, a bar per way."""
    points = of_one_gpu([point for point in points if "share_of_copy" in point.values])
    lengths = sorted({point.case["tokens"] for point in points})
    ways = list(dict.fromkeys(point.way for point in points))
    parts = list(dict.fromkeys(point.part for point in points))
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(3 + 4 * len(lengths), 2 + 0.4 * len(parts)), squeeze=False,
        sharey=True,
    )  # fmt: skip
    height = 0.8 / len(ways)
    for axis, tokens in zip(axes[0], lengths, strict=True):
        for number, way in enumerate(ways):
            share = {point.part: 100 * point.values["share_of_copy"] for point in points
                     if (point.case["tokens"], point.way) == (tokens, way)}  # fmt: skip
            places = [place + number * height for place in range(len(parts))]
            axis.barh(places, [share.get(part, 0) for part in parts], height, label=way)
        axis.axvline(100, color="k", linewidth=1)
        axis.set(title=f"{thousands(tokens)} tokens", xlabel="share of the copy bandwidth, %")
        axis.set_yticks([place + 0.4 - height / 2 for place in range(len(parts))], parts)
        axis.grid(alpha=0.3, axis="x")
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    return save(figure, f"{title}\n{machine(points)}", target)
