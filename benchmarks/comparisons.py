"""Comparisons that ``docs/performance.md`` shows: each is a claim, a table and maybe a chart.

A claim quotes its figures from the CSV, so it cannot be older than its table. Standard library
only, as in :mod:`benchmarks.rows`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from benchmarks.rows import USUAL_RELEASE, megatron_release, read_csv

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: From this day on V3.2's layers train the indexer on 1/8 of the query tokens.
SHARE_OF_QUERIES = "2026-11-28"

#: A comparison in a page: its name, and the block between the comments.
BLOCK = re.compile(r"(<!-- comparison: (\w+) -->)\n.*?(<!-- end -->)", re.S)
#: Measurements of one run are at most so far apart.
SAME_RUN = timedelta(minutes=1)


@dataclass(frozen=True)
class Line:
    """A row of a table, and a line of the chart.

    Attributes:
        label: its name.
        way: measured way; over: way it is divided by, ``None`` if the metric is a ratio itself.
        case: fields of the case; those that are ``None`` must be missing.
        over_case: fields in which the peer's case differs.
        part: part of the case.
        drawn: whether the chart has the line.
        megatron: release of megatron-core.
    """

    label: str
    way: str
    over: str | None
    case: dict = field(default_factory=dict)
    over_case: dict = field(default_factory=dict)
    part: str = "step"
    drawn: bool = True
    megatron: str = USUAL_RELEASE


@dataclass(frozen=True)
class Comparison:
    """Ratios of one metric against length.

    Attributes:
        name: file of the chart, without ending.
        family: of cases.
        claim: the result in one sentence; ``{}`` stand for the figures of ``quoted``.
        quoted: pairs of a line's label and a position along the axis.
        axis: what the ratios are, with the unit of the figures behind them.
        lines: at most four of them drawn.
        metric: a ratio of two ways, or a metric that is a ratio itself.
        along: field of the case along the axis, ``part`` for training steps.
        names: position -> name, for fields that are no number of tokens.
        since: older figures of ours are marked, or left out if ``drop_older``.
        charted: whether there is a chart.
        shown: positions that the table has, if not all.
        low: where the axis of the chart begins.
    """

    name: str
    family: str
    claim: str
    quoted: tuple[tuple[str, object], ...]
    axis: str
    lines: tuple[Line, ...]
    metric: str = "ms"
    along: str = "tokens"
    names: dict = field(default_factory=dict)
    gpu: str = H200
    since: str = ""
    drop_older: bool = False
    charted: bool = True
    shown: tuple = ()
    low: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """A cell: the ratio, the figures behind it, the run of ours."""

    ratio: float
    ours: float
    peer: float | None
    date: str


def _matches(row: dict, case: dict) -> bool:
    return all(row["case"].get(name) == value for name, value in case.items())


def _values(rows: list[dict], comparison: Comparison, line: Line, way: str, case: dict) -> dict:
    """Return position -> date -> value of a line's way, in the order of the file.

    Raises:
        ValueError: several cases match at one position.
    """
    found: dict = {}
    cases: dict = {}
    for row in rows:
        by_step = comparison.along == "part"
        if (
            row["gpu"] != comparison.gpu
            or row["status"] != "ok"
            or row["way"] != way
            or (row["part"] != line.part and not (by_step and row["part"].isdigit()))
            or megatron_release(row) != line.megatron
            or not _matches(row, case)
        ):
            continue
        place = int(row["part"]) if by_step else row["case"].get(comparison.along)
        if comparison.names and place not in comparison.names:
            continue
        if place is None or cases.setdefault(place, row["case"]) != row["case"]:
            raise ValueError(f"{comparison.name}: {way} matches several cases at {place}")
        if row["metric"] in (comparison.metric, "ms"):
            found.setdefault((place, row["metric"]), {})[row["date"]] = row["value"]
    return found


def ratios(comparison: Comparison, line: Line, rows: list[dict]) -> dict[object, Ratio]:
    """Return position -> cell of a line.

    Times are compared within the last run that has both ways: GPUs and hosts differ. Memory and
    losses do not depend on them, so the last run of each counts.
    """
    metric = comparison.metric
    mine = _values(rows, comparison, line, line.way, line.case)
    peer = {}
    if line.over is not None:
        peer = _values(rows, comparison, line, line.over, line.case | line.over_case)
    cells = {}
    for place, name in mine:
        if name != metric:
            continue
        runs = mine[place, metric]
        if line.over is None:
            date = list(runs)[-1]
            ms = mine.get((place, "ms"), {}).get(date, runs[date])
            cells[place] = Ratio(runs[date], ms, None, date)
            continue
        others = peer.get((place, metric), {})
        if metric == "ms":
            dates = _one_run(runs, others)
        else:
            dates = (list(runs)[-1], list(others)[-1]) if others else None
        if dates is None or (comparison.drop_older and dates[0] < comparison.since):
            continue
        ours, theirs = runs[dates[0]], others[dates[1]]
        cells[place] = Ratio(ours / theirs, ours, theirs, dates[0])
    return dict(sorted(cells.items(), key=lambda item: _order(comparison, item[0])))


def _one_run(ours: dict[str, float], peer: dict[str, float]) -> tuple[str, str] | None:
    """Return the dates of the last run that has both. Former rows have a date per measurement."""
    for mine in reversed(ours):
        for theirs in reversed(peer):
            apart = datetime.fromisoformat(mine) - datetime.fromisoformat(theirs)
            if abs(apart) <= SAME_RUN:
                return mine, theirs
    return None


def _order(comparison: Comparison, place) -> int:
    return list(comparison.names).index(place) if comparison.names else place


def all_ratios(comparison: Comparison, folder: Path) -> dict[str, dict[object, Ratio]]:
    """Return label -> position -> cell."""
    rows = read_csv(folder / f"{comparison.family}.csv")
    return {line.label: ratios(comparison, line, rows) for line in comparison.lines}


def place_name(comparison: Comparison, place) -> str:
    """Return the name of a position: ``8k``, or as the comparison says."""
    if comparison.names:
        return comparison.names[place]
    if comparison.along == "part" or place % 1024:
        return str(place)
    return f"{place // 1024}k"


def claim(comparison: Comparison, found: dict[str, dict[object, Ratio]]) -> str:
    """Return the claim with its figures."""
    figures = [
        ratio_text(comparison, found[label][place].ratio) for label, place in comparison.quoted
    ]
    return comparison.claim.format(*figures)


def ratio_text(comparison: Comparison, ratio: float) -> str:
    """Return a ratio as tables and claims write it."""
    if comparison.metric == "efficiency":
        return f"{100 * ratio:.0f} %"
    return f"{ratio:.3f}x" if comparison.metric == "validation_loss" else f"{ratio:.2f}x"


def _figure(comparison: Comparison, value: float) -> str:
    if comparison.metric == "peak_mib":
        value /= 1024
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def table(comparison: Comparison, found: dict[str, dict[object, Ratio]]) -> list[str]:
    """Return the lines of the table; a cell without a measurement says so."""
    places = comparison.shown or sorted(
        {place for cells in found.values() for place in cells},
        key=lambda place: _order(comparison, place),
    )
    head = [comparison.axis, *(place_name(comparison, place) for place in places)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for label, cells in found.items():
        texts = []
        for place in places:
            cell = cells.get(place)
            if cell is None:
                texts.append("not run")
                continue
            older = " *" if cell.date < comparison.since else ""
            figure = _figure(comparison, cell.ours)
            texts.append(f"{ratio_text(comparison, cell.ratio)} ({figure}){older}")
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return lines


def with_blocks(text: str, folder: Path) -> str:
    """Return a page with the block of every ``<!-- comparison: NAME -->`` written anew."""
    named = {comparison.name: comparison for comparison in COMPARISONS}
    return BLOCK.sub(lambda m: f"{m[1]}\n\n{block(named[m[2]], folder)}\n\n{m[3]}", text)


def block(comparison: Comparison, folder: Path) -> str:
    """Return what the page shows of a comparison: claim, chart, table."""
    found = all_ratios(comparison, folder)
    text = claim(comparison, found)
    chart = f"![{comparison.axis}](../benchmarks/{comparison.name}.png)"
    charts = [chart, ""] if comparison.charted else []
    return "\n".join([f"**{text}**", "", *charts, *table(comparison, found)])


def _layer(label: str, heads: int, way: str, over: str, drawn: bool = True) -> Line:
    return Line(label, way, over, {"preset": "v3.2", "heads": heads}, drawn=drawn)


def _masked(
    label: str, heads: int, part: str, over="cudnn-dense", dims=(128, 64, 128), drawn=True
) -> Line:
    nope, rope, v = dims
    case = {"heads": heads, "nope": nope, "rope": rope, "v": v, "distribution": "random"}
    return Line(label, "tilelang", over, case, part=part, drawn=drawn)


def _sparse(part: str, over: str, distribution: str, kind: str) -> Line:
    case = {"skv": 8192, "distribution": distribution}
    return Line(f"{part}, {kind} lists", "tilelang", over, case, part=part)


def _csa(label: str, preset: str, ratio: int) -> Line:
    return Line(label, "ours", "ours", {"preset": preset, "ratio": ratio}, {"ratio": 0})


def _engine(label: str, mlp: str, way: str) -> Line:
    return Line(label, way, None, {"mlp": mlp})


def _ranks(label: str, way: str, case: dict, drawn: bool = False) -> Line:
    fixed = {"kind": "layers", "layers": 1, "tp": 1, "cp": 1, "graph": None, "ratio": None}
    return Line(label, way, None, fixed | case, drawn=drawn)


V3, FLASH = {"preset": "v3.2", "heads": 128}, {"preset": "v4-flash"}
RANKS = "efficiency on four GPUs (ms)"

COMPARISONS: Sequence[Comparison] = (
    Comparison(
        "layer_time", "layer",
        "With 128 heads a layer takes {} the time of dense attention at 16k tokens, {} at 32k",
        (("128 heads", 16384), ("128 heads", 32768)),
        "time over dense attention (ms)",
        (
            _layer("128 heads", 128, "ours", "dense"),
            _layer("128 heads, frozen indexer", 128, "frozen", "dense", drawn=False),
            _layer("64 heads", 64, "ours", "dense"),
            _layer("64 heads, frozen indexer", 64, "frozen", "dense", drawn=False),
            _layer("16 heads, TP 8", 16, "masked-rank", "dense-rank"),
            _layer("16 heads, one GPU", 16, "ours", "dense", drawn=False),
        ),
        since=SHARE_OF_QUERIES,
    ),
    Comparison(
        "layer_memory", "layer",
        "With 128 heads the peak is {} of dense attention's at 32k, {} with recomputation at 16k",
        (("128 heads", 32768), ("128 heads, recomputed", 16384)),
        "peak memory over dense attention (GiB)",
        (
            _layer("128 heads", 128, "ours", "dense"),
            _layer("128 heads, recomputed", 128, "recomputed", "dense"),
            _layer("64 heads", 64, "ours", "dense"),
            _layer("16 heads", 16, "ours", "dense"),
            _layer("16 heads, recomputed", 16, "recomputed", "dense", drawn=False),
        ),
        metric="peak_mib", since="2026-11-25T12", drop_older=True,
    ),
    Comparison(
        "layer_bundled", "layer",
        "At 32k tokens with 128 heads a layer takes {} the time of megatron-core's bundled DSA",
        (("128 heads", 32768),),
        "time over the bundled layer (ms)",
        (
            _layer("128 heads", 128, "ours", "bundled"),
            _layer("16 heads", 16, "ours", "bundled"),
            replace(_layer("128 heads, Megatron's main", 128, "ours", "bundled"), megatron="0.20"),
        ),
        charted=False,
    ),
    Comparison(
        "layer_glm", "layer",
        "A DSA layer of GLM-5.3-Flash takes {} the time of dense attention at 8k tokens, {} at 32k",
        (("trained indexer", 8192), ("trained indexer", 32768)),
        "time over dense attention (ms)",
        tuple(
            Line(label, way, "dense", {"preset": "glm-5.3-flash"}, drawn=way != "frozen")
            for label, way in (
                ("trained indexer", "ours"), ("without pools", "unpooled"),
                ("frozen indexer", "frozen"), ("masked attention", "masked"),
                ("stage dense of this package", "ours-dense"),
            )
        ),
    ),
    Comparison(
        "masked_time", "masked",
        "Masked attention, 128 heads, 8k tokens: {} the time of cuDNN forward, {} backward",
        (("forward, 128 heads", 8192), ("backward, 128 heads", 8192)),
        "time over cuDNN without a mask (ms)",
        (
            _masked("forward, 128 heads", 128, "forward"),
            _masked("forward, 16 heads", 16, "forward"),
            _masked("forward, GLM-5, 64 heads", 64, "forward", dims=(192, 64, 256), drawn=False),
            _masked("backward, 128 heads", 128, "backward"),
            _masked("backward, 16 heads", 16, "backward"),
            _masked("backward, GLM-5, 64 heads", 64, "backward", dims=(192, 64, 256), drawn=False),
            _masked("FlashAttention 4: forward, 128 heads", 128, "forward", "flash4-dense",
                    drawn=False),
            _masked("FlashAttention 4: backward, 128 heads", 128, "backward", "flash4-dense",
                    drawn=False),
        ),
        low=0.7,
    ),
    Comparison(
        "attention_time", "attention",
        "With 16 heads and similar lists our kernels take {} the time of FlashMLA and {} of cuDNN",
        (("forward, clustered lists", "v3.2-h16"), ("backward, clustered lists", "v3.2-h16")),
        "time over FlashMLA or cuDNN (ms)",
        (
            _sparse("forward", "flashmla-raw", "random", "random"),
            _sparse("forward", "flashmla-raw", "clustered:0.8", "clustered"),
            _sparse("backward", "cudnn", "random", "random"),
            _sparse("backward", "cudnn", "clustered:0.8", "clustered"),
        ),
        along="preset",
        names={"v3.2-h16": "16 heads", "v3.2-h32": "32 heads", "v3.2-h64": "64 heads",
               "v3.2": "128 heads"},
        low=0.4,
    ),
    Comparison(
        "indexer_time", "indexer",
        "Scores and top-k take {} the time of cuDNN at 8k tokens, {} at 128k",
        (("selection over cuDNN", 8192), ("selection over cuDNN", 131072)),
        "time over a peer (ms)",
        (
            Line("selection over cuDNN", "tilelang", "cudnn", part="select"),
            Line("selection over Megatron", "tilelang", "megatron", part="select"),
            Line("sparse loss over cuDNN", "tilelang", "cudnn", part="loss:clustered"),
            Line("sparse loss over Megatron", "tilelang", "megatron", part="loss:clustered"),
        ),
    ),
    Comparison(
        "csa_time", "layer",
        "A CSA layer of V4-Pro takes {} the time of a window layer at 16k tokens",
        (("V4-Pro, CSA", 16384),),
        "time over a window layer (ms)",
        (
            _csa("V4-Flash, CSA", "v4-flash", 4),
            _csa("V4-Flash, HCA", "v4-flash", 128),
            _csa("V4-Pro, CSA", "v4-pro", 4),
            _csa("V4-Pro, HCA", "v4-pro", 128),
        ),
        since=SHARE_OF_QUERIES,
    ),
    Comparison(
        "connections_time", "connections",
        "With four streams V4-Pro takes {} the time of one stream at 8k tokens, V4-Flash {}",
        (("V4-Pro", 8192), ("V4-Flash", 8192)),
        "time over one residual stream (ms)",
        (
            Line("V4-Flash", "streams", "plain", {"preset": "v4-flash"}),
            Line("V4-Pro", "streams", "plain", {"preset": "v4-pro"}),
        ),
        gpu=H100, low=0.8,
    ),
    Comparison(
        "engine_time", "engine",
        "Tensorwise FP8 takes {} the time of bf16 at 8k tokens with a dense MLP, {} with experts",
        (("dense MLP, tensorwise", 8192), ("experts, tensorwise", 8192)),
        "time over transformer-engine in bf16 (ms)",
        (
            _engine("dense MLP, tensorwise", "dense", "te-tensorwise"),
            _engine("dense MLP, blockwise", "dense", "te-blockwise"),
            _engine("experts, tensorwise", "experts", "te-tensorwise"),
            _engine("experts, blockwise", "experts", "te-blockwise"),
        ),
        metric="time_over_te", low=0.7,
    ),
    Comparison(
        "ranks_efficiency", "ranks",
        "On four GPUs a layer of 32k tokens has an efficiency of {} with CP 4, {} with TP 4",
        (("sparse, CP 4", 32768), ("masked, TP 4 by `select`", 32768)),
        RANKS,
        (
            _ranks("sparse, CP 4", "zigzag", V3 | {"cp": 4}, drawn=True),
            _ranks("masked, CP 4", "masked", V3 | {"cp": 4}),
            _ranks("sparse, TP 4 by `heads`", "heads", V3 | {"tp": 4}, drawn=True),
            _ranks("sparse, TP 4 by `sequence`", "rows", V3 | {"tp": 4}, drawn=True),
            _ranks("masked, TP 4 by `select`", "select", V3 | {"tp": 4}, drawn=True),
            _ranks("masked, TP 4 by `select`, CUDA graph", "select", V3 | {"tp": 4, "graph": True}),
            _ranks("dense, TP 4", "dense", V3 | {"tp": 4}),
            _ranks("V4-Flash CSA, CP 4", "zigzag", FLASH | {"cp": 4, "ratio": 4}),
            _ranks("V4-Flash CSA, CP 4, CUDA graph", "zigzag",
                   FLASH | {"cp": 4, "ratio": 4, "graph": True}),
            _ranks("V4-Flash HCA, CP 4", "zigzag", FLASH | {"cp": 4, "ratio": 128}),
            _ranks("V4-Flash CSA, TP 4", "rows", FLASH | {"tp": 4, "ratio": 4}),
        ),
        metric="efficiency", since=SHARE_OF_QUERIES,
    ),
    Comparison(
        "train_loss", "train",
        "After 300 steps the loss is {} and {} of dense attention's: no gap beyond its seeds",
        (("sparse, seed 1", 300), ("sparse, seed 2", 300)),
        "validation loss over dense attention (nats)",
        tuple(
            Line(f"{label}, seed {seed}", way, "dense", {"kind": "convergence", "run": seed})
            for label, way, seed in (
                ("sparse", "sparse", 1), ("sparse", "sparse", 2),
                ("dense, then sparse", "staged", 1),
            )
        ),
        metric="validation_loss", along="part", shown=(100, 200, 300), low=0.94,
    ),
)  # fmt: skip
