"""Charts of the layer benchmark, drawn from its CSV and written next to it.

``<csv>_time.png``: a step's time against the length. ``<csv>_shares.png``: where ours spends it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.charts import _machine, _save, pyplot, ticker
from benchmarks.layer_summary import (
    GROUPS,
    grouped_shares,
    read_rows,
    steps,
    times,
    tokens_text,
)


def draw_layer(path: Path) -> list[Path]:
    """Draw what the rows of a CSV allow; return the files that were written."""
    rows = read_rows(path)
    written = []
    if any(row["operation"] == "step" and row["status"] == "ok" for row in rows):
        written.append(draw_times(rows, path.with_name(f"{path.stem}_time.png")))
    if grouped_shares(rows):
        written.append(draw_shares(rows, path.with_name(f"{path.stem}_shares.png")))
    return written


def draw_times(rows: list[dict], target: Path) -> Path:
    """Draw time against length, a panel per number of heads, a line per way."""
    found_heads = sorted({row["heads"] for row in rows}, reverse=True)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(found_heads), figsize=(1 + 5 * len(found_heads), 5), squeeze=False, sharey=True
    )
    for axis, heads in zip(axes[0], found_heads, strict=True):
        found = steps(rows, heads)
        for number, way in enumerate(ways):
            line = times(found.get(way, {}))
            axis.plot(list(line), list(line.values()), marker="o", color=f"C{number}", label=way)
        lengths = sorted({row["rows"] for row in rows if row["heads"] == heads})
        axis.set(title=f"{heads} heads", xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
        axis.set_xticks(lengths, [tokens_text(n) for n in lengths])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_tick_params(labelleft=True)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    _save(figure, _title(rows, "forward and backward"), target)
    return target


def draw_shares(rows: list[dict], target: Path) -> Path:
    """Draw the parts of a step's kernel time as stacked bars, the total written behind them."""
    bars = grouped_shares(rows)
    totals = [sum(groups.values()) for groups in bars.values()]
    figure, axis = pyplot.subplots(figsize=(10, 2.2 + 0.36 * len(bars)))
    left = [0.0] * len(bars)
    for group in GROUPS:
        shares = [
            100 * groups[group] / total for groups, total in zip(bars.values(), totals, strict=True)
        ]
        drawn = axis.barh(range(len(bars)), shares, left=left, label=group)
        labels = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        axis.bar_label(drawn, labels, label_type="center", fontsize=8, color="white")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, total in enumerate(totals):
        axis.text(101, place, f"{total:.3g} ms", va="center", fontsize=8)
    axis.set_yticks(
        range(len(bars)),
        [f"{heads} heads, {tokens_text(tokens)}" for heads, tokens in bars],
        fontsize=8,
    )
    axis.invert_yaxis()
    axis.set(xlabel="share of the kernel time of a step, %", xlim=(0, 112))
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8,
                  frameon=False)  # fmt: skip
    _save(figure, _title(rows, "where ours spends its time"), target,
          bottom=0.5 / figure.get_figheight())  # fmt: skip
    return target


def _title(rows: list[dict], what: str) -> str:
    return f"{rows[-1]['preset']}: an attention layer, {what}\n{_machine(rows[-1])}"
