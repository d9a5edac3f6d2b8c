"""Figures quoted by the documentation, compared with the committed CSVs."""

import functools
import re
from pathlib import Path

import pytest

from benchmarks.schema import latest, read_csv

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
#: Family, fields of the case, way, part, metric, quoted value.
QUOTED = [
    ("attention", {"preset": "v3.2", "skv": 8192, "distribution": "random"}, "flashmla", "forward",
     "ms", 3.87),
    ("attention", {"preset": "v3.2-h16", "skv": 131072, "distribution": "clustered:0.8"},
     "tilelang", "backward", "ms", 5.2),
    ("indexer", {"tokens": 8192}, "megatron", "select", "ms", 9.08),
    ("csa", {"tokens": 65536}, "triton", "compressor_forward, ratio 4, dim 512", "share_of_copy",
     0.88),
    ("csa", {"tokens": 4096}, "triton", "norm_rope_backward, heads 64, dim 512", "share_of_copy",
     0.87),
    ("csa", {"tokens": 65536}, "eager", "norm_rope_forward, heads 64, dim 512", "ms", 32.5),
    ("masked", {"heads": 128, "tokens": 8192}, "tilelang", "backward", "tflops", 474),
    ("masked", {"heads": 64, "v": 256, "tokens": 8192}, "cudnn-dense", "forward", "ms", 3.09),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 4096}, "ours", "step", "ms", 13.731),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 12288}, "sparse", "step", "ms", 82.8),
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


@functools.cache
def column(family, metric, part=None):
    return {
        (tuple(sorted(row["case"].items())), row["way"], row["part"]): row["value"]
        for row in latest(read_csv(FOLDER / f"{family}.csv"))
        if row["metric"] == metric and row["status"] == "ok" and part in (None, row["part"])
    }


#: Label in the page's tables -> way, and which ranks it has 2 and 4 of.
RANKS = {
    "| sparse |": ("zigzag", "cp"), "| masked |": ("masked", "cp"),
    "| sparse, `heads` |": ("heads", "tp"),
    "| sparse, `sequence` |": ("rows", "tp"),
    "| masked, `heads` |": ("masked heads", "tp"),
    "| masked, `select` |": ("select", "tp"),
    "| dense |": ("dense", "tp"),
}  # fmt: skip
#: Columns of V4's table: fields of the case, and the way.
V4_COLUMNS = (
    ({"cp": 2}, "zigzag"), ({"cp": 4}, "zigzag"), ({"cp": 4, "graph": True}, "zigzag"),
    ({"tp": 2}, "rows"), ({"tp": 4}, "rows"),
)  # fmt: skip
#: ``94 %, 67.9 (3 %)``
CELL = re.compile(r"\**([\d.]+) %\**, ([\d.]+) \(([\d.]+) %\)")


def check_cell(cell, fields, way):
    """Check a table cell with figures; return whether it has any."""
    found = CELL.search(cell)
    if found is None:
        assert cell.strip() == "not run", cell
        return False
    case = {"tp": 1, "cp": 1, "kind": "layers", "layers": 1, "workspace_mib": 256} | fields
    key = (tuple(sorted(case.items())), way, "step")
    efficiency, ms, exposed = map(float, found.groups())
    assert 100 * column("ranks", "efficiency", "step")[key] == pytest.approx(efficiency, abs=0.51)
    assert column("ranks", "ms", "step")[key] == pytest.approx(ms, rel=6e-3)
    assert 100 * column("ranks", "exposed_share", "step")[key] == pytest.approx(exposed, abs=0.51)
    return True


def test_tables_of_layers_on_several_gpus():
    page = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.split("### Layers on two and four GPUs")[1].split("\n### ")[0]
    kind, checked = None, {"v3.2": 0, "v4-flash": 0}
    for line in section.splitlines():
        cells = line.split("|")[1:-1]
        if not line:  # end of the table
            kind = None
        elif line.startswith(("| CSA |", "| HCA |")):
            kind = {"CSA": 4, "HCA": 128}[cells[0].strip()]
        else:
            kind = next((RANKS[start] for start in RANKS if line.startswith(start)), kind)
        found = re.match(r"\|[^|]*\| (\d+)k\b", line)
        if not found or kind is None:
            continue
        tokens = 1024 * int(found[1])
        if isinstance(kind, int):
            preset = {"preset": "v4-flash", "ratio": kind}
            columns = [(preset | fields, way) for fields, way in V4_COLUMNS]
        else:
            way, size = kind
            columns = [({"preset": "v3.2", "heads": 128, size: ranks}, way) for ranks in (2, 4)]
        for cell, (fields, way) in zip(cells[3:], columns, strict=False):
            checked[fields["preset"]] += check_cell(cell, fields | {"tokens": tokens}, way)
    assert checked == {"v3.2": 39, "v4-flash": 19}


@functools.cache
def losses_of_runs():
    """Return (model, way) -> mean loss per step of every run of 200 steps on ranks."""
    runs = {}
    for row in read_csv(FOLDER / "train.csv"):
        if (row["case"]["kind"], row["metric"]) == ("ranks", "lm_loss") and row["part"].isdigit():
            mine = runs.setdefault((row["case"]["model"], row["way"]), [])
            if row["part"] == "1":
                mine.append([])
            mine[-1].append(row["value"])
    return runs


def of_one_rank(model):
    alone = losses_of_runs()[model, "one rank"]
    alone = alone + losses_of_runs().get((model, "one rank again"), [])
    assert len(alone) == 4 and {len(losses) for losses in alone} == {200}
    return alone


def test_training_on_ranks_beside_one():
    runs = losses_of_runs()
    quoted = {
        ("v3.2", "one rank"): [(0.34, 0.19), (-0.21, 0.18)],
        ("v3.2", "one rank again"): [(0.11, 0.15), (-0.24, 0.19)],
        ("v3.2", "TP2"): [(-0.52, 0.34)], ("v3.2", "CP2"): [(0.53, 0.23)],
        ("v3.2", "DP2"): [(-0.40, 0.25)], ("v3.2", "TP2 x CP2"): [(0.18, 0.16), (-0.44, 0.31)],
        ("v4", "one rank"): [(-0.04, 0.61), (0.05, 0.75), (-0.17, 0.68), (0.17, 0.66)],
        ("v4", "TP2"): [(0.63, 1.40)], ("v4", "CP2"): [(0.35, 0.89)],
        ("v4", "EP2"): [(-0.50, 0.91)], ("v4", "TP2 x CP2 x EP2"): [(-0.18, 0.98)],
    }  # fmt: skip
    assert set(runs) == set(quoted)
    for (model, way), expected in quoted.items():
        one = [sum(losses) / 4 for losses in zip(*of_one_rank(model), strict=True)]
        for run, quote in zip(runs[model, way], expected, strict=True):
            every = sum(abs(b - a) / a for a, b in zip(one, run, strict=True)) / len(one)
            found = (100 * (sum(run[-20:]) / sum(one[-20:]) - 1), 100 * every)
            assert found == pytest.approx(quote, abs=6e-3), (model, way)
