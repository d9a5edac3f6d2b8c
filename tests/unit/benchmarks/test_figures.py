"""Figures that the documentation quotes are in the committed CSVs, where a reader looks."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.schema import latest, read_csv

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
#: Family, fields of the case, way, part, metric, and the value that a page quotes.
QUOTED = [
    ("attention", {"preset": "v3.2", "skv": 8192, "distribution": "random"}, "flashmla", "forward",
     "ms", 3.87),
    ("attention", {"preset": "v3.2-h16", "skv": 131072, "distribution": "clustered:0.8"},
     "tilelang", "backward", "ms", 5.2),
    ("indexer", {"tokens": 8192}, "megatron", "select", "ms", 9.08),
    ("indexer", {"tokens": 131072}, "fp8", "select", "ms", 177),
    ("csa", {"tokens": 65536}, "triton", "compressor_forward, ratio 4, dim 512", "share_of_copy",
     0.88),
    ("csa", {"tokens": 4096}, "triton", "norm_rope_backward, heads 64, dim 512", "share_of_copy",
     0.87),
    ("csa", {"tokens": 65536}, "eager", "norm_rope_forward, heads 64, dim 512", "ms", 32.5),
    ("masked", {"heads": 128, "tokens": 8192}, "tilelang", "backward", "tflops", 474),
    ("masked", {"heads": 64, "v": 256, "tokens": 8192}, "cudnn-dense", "forward", "ms", 3.09),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 4096}, "ours", "step", "ms", 15.891),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 12288}, "sparse", "step", "ms", 85.8),
    ("layer", {"preset": "v3.2", "heads": 64, "tokens": 8192}, "ours-dense", "step", "ms", 18.1),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 131072}, "ours", "step", "ms", 1356.1),
    ("layer", {"preset": "v3.2", "heads": 16, "tokens": 4096}, "bundled", "step", "ms", 47.5),
    ("layer", {"preset": "v3.2", "heads": 16, "tokens": 131072}, "ours", "step", "peak_mib",
     8886.2),
    ("engine", {"tokens": 32768, "mlp": "experts"}, "te-tensorwise", "step", "ms", 658.5),
    ("connections", {"preset": "v4-pro", "tokens": 8192}, "triton", "read_backward",
     "share_of_copy", 0.803),
    ("layer", {"preset": "v4-pro", "ratio": 4, "tokens": 4096}, "ours", "step", "ms", 23.953),
    ("layer", {"preset": "core", "tokens": 8192, "workspace_mib": 64}, "torch", "step", "peak_mib",
     695.0),
    ("ranks", {"preset": "v3.2-h32", "tokens": 8192, "tp": 2}, "rows", "step", "ms", 30.2),
    ("ranks", {"preset": "v4-flash", "ratio": 4, "tokens": 65536, "cp": 2}, "zigzag", "step", "ms",
     104),
    ("ranks", {"graph": True, "tokens": 8192, "tp": 4}, "select", "step", "ms", 14.055),
    ("ranks", {"graph": True, "tokens": 8192, "tp": 4}, "dense", "step", "ms", 12.117),
    ("ranks", {"graph": True, "tokens": 8192, "tp": 4}, "rows", "step", "efficiency", 0.70466),
    ("ranks", {"kind": "dense", "tokens": 32768}, "gathered latents", "step", "ms", 115),
    ("ranks", {"kind": "simulated", "tokens": 32768, "tp": 8}, "rows", "step", "ms", 21.9),
    ("train", {"kind": "operations", "model": "sparse", "tokens": 4096}, "ours", "attention",
     "executed_gflop", 12535),
    ("train", {"kind": "run", "model": "v3.2"}, "fast", "all", "peak_mib", 14635.13),
    ("train", {"kind": "run", "model": "v4"}, "straight", "50", "lm_loss", 2.72992802),
    ("train", {"kind": "convergence", "run": 1}, "dense", "25", "validation_loss", 3.00563),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "case", "way", "part", "metric", "value"),
    QUOTED,
    ids=lambda value: str(value)[:40],
)
def test_quoted_figures_are_recorded(family, case, way, part, metric, value):
    found = {
        row["value"] for row in latest(read_csv(FOLDER / f"{family}.csv"))
        if (row["way"], row["part"], row["metric"]) == (way, part, metric)
        and case.items() <= row["case"].items()
    }  # fmt: skip
    digits = len(str(value).replace(".", "").strip("0"))
    assert float(f"{value:g}") in {float(f"{v:.{digits}g}") for v in found} or value in found, found


def column(family, metric, part=None):
    """Values of a metric by case's fields, way and part, of the committed CSV."""
    return {
        (tuple(sorted(row["case"].items())), row["way"], row["part"]): row["value"]
        for row in latest(read_csv(FOLDER / f"{family}.csv"))
        if row["metric"] == metric and row["status"] == "ok" and part in (None, row["part"])
    }


#: Row of the page's tables -> way, and which ranks it has 2 and 4 of.
RANKS = {
    "| sparse |": ("zigzag", "cp"), "| masked |": ("masked", "cp"),
    "| sparse, `heads` |": ("heads", "tp"),
    "| sparse, `sequence` |": ("rows", "tp"),
    "| masked, `heads` |": ("masked heads", "tp"),
    "| masked, `select` |": ("select", "tp"),
    "| dense |": ("dense", "tp"),
}  # fmt: skip
#: ``94 %, 67.9 (3 %)``
CELL = re.compile(r"\**([\d.]+) %\**, ([\d.]+) \(([\d.]+) %\)")


def test_table_of_layers_on_several_gpus():
    """Every cell of V3.2's tables, from the CSV."""
    metrics = {
        name: column("ranks", name, "step") for name in ("ms", "efficiency", "exposed_share")
    }
    page = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.split("### Layers on two and four GPUs")[1].split("\nV4-Flash")[0]
    kind, checked = None, 0
    for line in section.splitlines():
        kind = next((RANKS[start] for start in RANKS if line.startswith(start)), kind)
        found = re.match(r"\|[^|]*\| (\d+)k \|", line)
        if not found or kind is None:
            continue
        way, size = kind
        for ranks, cell in zip((2, 4), CELL.findall(line), strict=False):
            case = {"tp": 1, "cp": 1} | {size: ranks}
            case |= {"heads": 128, "kind": "layers", "layers": 1, "preset": "v3.2"}
            case |= {"tokens": 1024 * int(found[1]), "workspace_mib": 256}
            key = (tuple(sorted(case.items())), way, "step")
            efficiency, ms, exposed = map(float, cell)
            assert 100 * metrics["efficiency"][key] == pytest.approx(efficiency, abs=0.51), line
            assert metrics["ms"][key] == pytest.approx(ms, rel=6e-3), line
            assert 100 * metrics["exposed_share"][key] == pytest.approx(exposed, abs=0.51), line
            checked += 1
    assert checked == 39


def test_training_on_four_gpus_beside_one():
    """Mean loss of the last steps against one rank's, and mean difference of all steps, in %."""
    losses = {}
    for (case, way, part), value in column("train", "lm_loss").items():
        fields = dict(case)
        if fields["kind"] == "ranks" and part.isdigit():
            losses.setdefault((fields["model"], way), {})[int(part)] = value
    quoted = {
        ("v3.2", "one rank again"): (-0.23, 0.15), ("v3.2", "TP2 x CP2"): (-0.17, 0.11),
        ("v4", "one rank again"): (0.21, 2.3),
    }  # fmt: skip
    for (model, way), expected in quoted.items():
        one, other = losses[model, "one rank"], losses[model, way]
        assert one.keys() == other.keys() == set(range(1, 201))
        ends = [sum(curve[step] for step in range(181, 201)) / 20 for curve in (one, other)]
        every = sum(abs(other[step] - one[step]) / one[step] for step in one) / len(one)
        found = (100 * (ends[1] / ends[0] - 1), 100 * every)
        assert found == pytest.approx(expected, rel=3e-2), (model, way)


def test_kernels_of_each_rank():
    """All but NCCL's, in ms, from the timelines."""
    file = FOLDER / "ranks_timelines.jsonl"
    found = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        busy = [sum(end - start for start, end in rank["other kernels"]) for rank in line["ranks"]]
        found[line["way"], line["case"]["tokens"], line["case"].get("graph")] = busy
    assert found["rows", 131072, None] == pytest.approx([301, 321, 339, 352], abs=0.6)
    for way, bounds in (("zigzag", (59.6, 61.8)), ("masked", (118, 123))):
        busy = found[way, 32768, None]
        assert (min(busy), max(busy)) == pytest.approx(bounds, abs=0.5), way
