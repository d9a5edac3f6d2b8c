"""Charts of single operations: sparse attention, and V4's memory-bound pieces."""

from __future__ import annotations

from pathlib import Path

from benchmarks.attention.shapes import PRESETS
from benchmarks.charts.drawing import (
    Point,
    machine,
    mark_lengths,
    of_last_gpu,
    pyplot,
    save,
    thousands,
)

LINE_STYLES = ("-", "--", ":", "-.")


def draw_attention(points: list[Point], folder: Path) -> list[Path]:
    """Draw the speed of every preset."""
    written = []
    for name in dict.fromkeys(point.case["preset"] for point in points):
        mine = of_last_gpu([point for point in points if point.case["preset"] == name])
        p = PRESETS[name]
        title = (
            f"{name}: {p.heads} heads, dims {p.qk_dim}/{p.v_dim}, K = {p.topk}, "
            f"{mine[-1].case['queries']} queries\n{machine(mine)}"
        )
        if any(point.part in ("forward", "backward") for point in mine):
            written.append(draw_speed(mine, title, folder / f"attention_{name}_tflops.png"))
    return written


def draw_speed(points: list[Point], title: str, target: Path) -> Path:
    """Draw TFLOP/s against the keys, one line per way and index distribution."""
    parts = [name for name in ("forward", "backward") if any(p.part == name for p in points)]
    ways = list(dict.fromkeys(point.way for point in points if point.part in parts))
    kinds = list(dict.fromkeys(point.case["distribution"] for point in points))
    figure, axes = pyplot.subplots(
        1, len(parts), figsize=(6 * len(parts), 5), squeeze=False, sharey=True
    )
    lengths = sorted({point.case["skv"] for point in points})
    peaks = sorted(point.values["tflops"] for point in points if point.part == "gemm")
    for axis, part in zip(axes[0], parts, strict=True):
        for number, way in enumerate(ways):
            for style, kind in enumerate(kinds):
                line = {
                    point.case["skv"]: point.values["tflops"] for point in points
                    if (point.part, point.way, point.case["distribution"]) == (part, way, kind)
                }  # fmt: skip
                if line:
                    axis.plot(
                        sorted(line), [line[skv] for skv in sorted(line)], marker="o",
                        color=f"C{number}", linestyle=LINE_STYLES[style % len(LINE_STYLES)],
                        label=f"{way}, {kind}",
                    )  # fmt: skip
        if peaks:
            peak = peaks[len(peaks) // 2]
            axis.axhline(peak, color="k", linewidth=1, label=f"bf16 GEMM, {peak:.3g} TFLOP/s")
        axis.set(title=part, xlabel="keys", ylabel="TFLOP/s", xscale="log", ylim=(0, None))
        mark_lengths(axis, lengths)
    return save(figure, title, target)


def draw_csa(points: list[Point], folder: Path) -> list[Path]:
    """Draw the share of the copy bandwidth, one panel per length, a bar per way."""
    points = of_last_gpu([point for point in points if "share_of_copy" in point.values])
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
    title = f"Memory-bound operations of V4's attention\n{machine(points)}"
    return [save(figure, title, folder / "csa_pieces.png")]
