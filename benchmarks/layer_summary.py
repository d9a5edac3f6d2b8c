"""What the table of the layer benchmark says: ratios to the peers, break-even, groups of shares."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

OURS, DENSE = "ours", "dense"
#: Parts of a step -> operations of the trace. Whatever is in none is in the last one.
GROUPS = {
    "projections": ("matrix products",),
    "index scores": ("indexer_scores",),
    "selection": ("indexer_topk",),
    "attention forward": ("sparse_attention_forward",),
    "attention backward": ("sparse_attention_backward",),
    "indexer loss and its backward": (
        "sparse_attention_probabilities", "sparse_indexer_loss",
    ),
    "rope, norms, copies": (),
}  # fmt: skip
_GROUP_OF = {operation: group for group, names in GROUPS.items() for operation in names}
_REST = list(GROUPS)[-1]


def read_rows(path: Path) -> list[dict]:
    """Return the last row of every measurement on the GPU that wrote last, numbers as numbers.

    A step that did not run well drops the shares of one that did before.
    """
    last: dict[tuple, dict] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            row["heads"], row["rows"] = int(row["heads"]), int(row["rows"])
            for name in ("median_ms", "p10_ms", "p90_ms", "tokens_per_s", "peak_mib"):
                row[name] = float(row[name]) if row[name] else None
            case = tuple(row[name] for name in ("gpu", "preset", "heads", "rows", "way"))
            if row["operation"] == "step":
                last = {key: old for key, old in last.items() if key[:-1] != case}
            last[(*case, row["operation"])] = row
    rows = list(last.values())
    return [row for row in rows if row["gpu"] == rows[-1]["gpu"]]


def steps(rows: list[dict], heads: int) -> dict[str, dict[int, dict]]:
    """Return way -> tokens -> row of the step, of whatever was tried."""
    found: dict[str, dict[int, dict]] = {}
    for row in sorted(rows, key=lambda row: row["rows"]):
        if row["operation"] == "step" and row["heads"] == heads:
            found.setdefault(row["way"], {})[row["rows"]] = row
    return found


def times(steps_of_way: Mapping[int, dict]) -> dict[int, float]:
    """Return tokens -> milliseconds of the steps that ran."""
    return {
        tokens: row["median_ms"] for tokens, row in steps_of_way.items() if row["status"] == "ok"
    }


def break_even(ours: Mapping[int, float], peer: Mapping[int, float]) -> float | None:
    """Return from how many tokens on ours is not slower, ``None`` if not at the longest.

    Args:
        ours, peer: tokens -> time, any unit.

    Between two lengths the ratio of times is taken for a power of the length. If ours is not slower
    anywhere, the result is the shortest length, and break-even may lie below.
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
    share = -low / (high - low)
    return lengths[place] * (lengths[place + 1] / lengths[place]) ** share


def grouped_shares(rows: list[dict]) -> dict[tuple[int, int], dict[str, float]]:
    """Return (heads, tokens) -> group -> milliseconds of kernels in a step of ours."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: (-row["heads"], row["rows"])):
        operation = row["operation"].removeprefix("step/")
        if row["way"] != OURS or row["status"] != "ok" or operation == row["operation"]:
            continue
        groups = found.setdefault((row["heads"], row["rows"]), dict.fromkeys(GROUPS, 0.0))
        groups[_GROUP_OF.get(operation, _REST)] += row["median_ms"]
    return found


def tokens_text(tokens: float) -> str:
    """Return a length as people say it."""
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else f"{tokens:.0f}"


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason'][:60]}"
    memory = "" if row["peak_mib"] is None else f", {row['peak_mib'] / 1024:.3g} GiB"
    return f"{row['median_ms']:.4g} ({row['p10_ms']:.4g} to {row['p90_ms']:.4g}){memory}"


def summary_lines(rows: list[dict]) -> list[str]:
    """Return a table in Markdown, ratios first, and a sentence per peer."""
    found_heads = sorted({row["heads"] for row in rows}, reverse=True)
    ways = dict.fromkeys(row["way"] for row in rows if row["operation"] == "step")
    peers = [way for way in ways if way != OURS]
    head = [f"{peer} / ours" for peer in peers] + ["heads", "tokens", "tokens/s"]
    head += [f"{way}: ms (10 to 90 %), peak" for way in (OURS, *peers)]
    lines, sentences = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], []
    for heads in found_heads:
        found = steps(rows, heads)
        ours = times(found.get(OURS, {}))
        ratios = {
            peer: {n: ms / ours[n] for n, ms in times(found.get(peer, {})).items() if n in ours}
            for peer in peers
        }
        for tokens, row in found.get(OURS, {}).items():
            cells = [f"{r[tokens]:.2f}x" if tokens in r else "-" for r in ratios.values()]
            speed = f"{row['tokens_per_s']:.4g}" if row["tokens_per_s"] else "-"
            cells += [str(heads), tokens_text(tokens), speed]
            cells += [_cell(found.get(way, {}).get(tokens)) for way in (OURS, *peers)]
            lines.append(f"| {' | '.join(cells)} |")
        for peer, values in ratios.items():
            if values:
                point = break_even(ours, times(found[peer]))
                sentences.append(_sentence(heads, peer, values, point))
    return [*lines, "", *sentences]


def _sentence(heads: int, peer: str, ratios: dict[int, float], point: float | None) -> str:
    if point is None:
        even = "no break-even up to there"
    elif point == min(ratios):
        even = f"break-even at or below {tokens_text(point)}"
    else:
        even = f"break-even at {tokens_text(point)}"
    longest = max(ratios)
    return f"{heads} heads, {peer} / ours: {ratios[longest]:.2f}x at {tokens_text(longest)}, {even}"


def print_summary(path: Path) -> None:
    """Print the summary of a table."""
    print("", *summary_lines(read_rows(path)), sep="\n")
