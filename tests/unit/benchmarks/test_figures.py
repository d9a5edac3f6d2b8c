"""Figures quoted by the documentation, compared with the committed CSVs."""

import functools
import re
from pathlib import Path

import pytest

from benchmarks.rows import latest, read_csv

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
PAGE = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")
#: Family, fields of the case, way, part, metric, and the value that a page quotes.
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
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 32768}, "ours", "step", "ms", 242),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 32768}, "dense", "step", "ms", 377),
    ("layer", {"preset": "v3.2", "heads": 16, "tokens": 4096}, "graph", "step", "ms", 3.1),
    ("indexer", {"tokens": 65536}, "triton", "dense", "ms", 1322),
    ("connections", {"preset": "v4-flash", "tokens": 8192}, "streams", "step", "ms", 83.6),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 12288}, "sparse", "step", "ms", 82.8),
    ("layer", {"preset": "v3.2", "heads": 64, "tokens": 8192}, "ours-dense", "step", "ms", 18.1),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 131072}, "ours", "step", "ms", 1250),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 262144}, "ours", "step", "ms", 3070),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 262144}, "recomputed", "step", "ms", 3340),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 524288}, "recomputed", "step", "ms", 8740),
    ("layer", {"preset": "v3.2", "heads": 128, "tokens": 524288}, "recomputed", "step", "peak_mib",
     84770),
    ("ranks", {"preset": "v3.2", "tokens": 1048576, "cp": 4}, "recomputed", "step", "ms", 6590),
    ("ranks", {"preset": "v4-flash", "tokens": 1048576, "cp": 4}, "zigzag", "step", "ms", 1580),
    ("layer", {"preset": "v4-flash", "ratio": 4, "tokens": 1048576}, "recomputed", "step", "ms",
     6810),
    ("layer", {"preset": "v4-flash", "ratio": 4, "tokens": 1048576}, "recomputed", "step",
     "peak_mib", 81427),
    ("layer", {"preset": "v4-flash", "ratio": 128, "tokens": 1048576}, "recomputed", "step", "ms",
     7150),
    ("layer", {"preset": "v4-flash", "ratio": 4, "tokens": 131072}, "recomputed", "step", "ms",
     423),
    ("layer", {"preset": "glm-5.3-flash-kda", "tokens": 8192}, "ours", "step", "ms", 20.8),
    ("layer", {"preset": "glm-5.3-flash", "tokens": 32768}, "unpooled", "step/indexer_scores",
     "ms", 6.727),
    ("layer", {"preset": "glm-5.3-flash", "tokens": 32768}, "ours", "step/indexer_scores", "ms",
     1.6393),
    ("attention", {"preset": "h64-d512", "skv": 8192}, "tilelang", "backward", "tflops", 407.1),
    ("attention", {"preset": "h64-d512", "skv": 32768}, "tilelang", "backward", "tflops", 299),
    ("attention", {"preset": "glm-5.3", "skv": 32768}, "tilelang", "backward", "tflops", 250),
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


#: Row of the page's table of four GPUs -> way, and fields of the case.
RANKS = {
    "sparse, CP 4": ("zigzag", {"cp": 4}), "masked, CP 4": ("masked", {"cp": 4}),
    "sparse, TP 4 by `heads`": ("heads", {"tp": 4}),
    "sparse, TP 4 by `sequence`": ("rows", {"tp": 4}),
    "masked, TP 4 by `select`": ("select", {"tp": 4}),
    "masked, TP 4 by `select`, CUDA graph": ("select", {"tp": 4, "graph": True}),
    "dense, TP 4": ("dense", {"tp": 4}),
    "V4-Flash CSA, CP 4": ("zigzag", {"cp": 4, "ratio": 4}),
    "V4-Flash CSA, CP 4, CUDA graph": ("zigzag", {"cp": 4, "ratio": 4, "graph": True}),
    "V4-Flash HCA, CP 4": ("zigzag", {"cp": 4, "ratio": 128}),
    "V4-Flash CSA, TP 4": ("rows", {"tp": 4, "ratio": 4}),
}  # fmt: skip


def test_table_of_layers_on_four_gpus():
    """Every cell from the CSV, read without the code that wrote the table."""
    section = PAGE.split("<!-- comparison: ranks_efficiency -->")[1].split("<!-- end -->")[0]
    (_, *lengths), _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines() if line.startswith("|")
    )  # fmt: skip
    efficiency, ms = column("ranks", "efficiency", "step"), column("ranks", "ms", "step")
    checked = 0
    for label, *cells in lines:
        way, fields = RANKS[label]
        model = {"preset": "v4-flash"} if "ratio" in fields else {"preset": "v3.2", "heads": 128}
        for length, cell in zip(lengths, cells, strict=True):
            case = {"tp": 1, "cp": 1, "kind": "layers", "layers": 1, "workspace_mib": 256}
            case |= model | fields | {"tokens": 1024 * int(length.removesuffix("k"))}
            key = (tuple(sorted(case.items())), way, "step")
            if cell == "not run":
                assert key not in efficiency
                continue
            share, time = map(float, re.fullmatch(r"(\d+) % \(([\d.]+)\)(?: \*)?", cell).groups())
            assert 100 * efficiency[key] == pytest.approx(share, abs=0.51)
            assert ms[key] == pytest.approx(time, rel=6e-3)
            checked += 1
    assert [label for label, *_ in lines] == list(RANKS) and checked == 24


def test_kernels_of_a_rank():
    """Kernels of a step but collectives, of the sentence on one of eight ranks."""
    found = {}
    for row in latest(read_csv(FOLDER / "layer.csv")):
        if (
            row["gpu"] == "NVIDIA H200" and row["way"] in ("masked-rank", "dense-rank")
            and row["metric"] == "ms" and row["part"].startswith("step/")
            and row["part"] != "step/collectives"
        ):  # fmt: skip
            key = (row["case"]["tokens"], row["way"])
            found[key] = found.get(key, 0) + row["value"]
    section = PAGE.split("### One of eight tensor-parallel ranks")[1].split("\n## ")[0]
    quoted = re.findall(r"([\d.]+) / ([\d.]+)(?: ms)? at (\d+)k", section)
    assert len(quoted) == 4
    ratios = []
    for ours, dense, tokens in quoted:
        mine, peer = (found[1024 * int(tokens), way] for way in ("masked-rank", "dense-rank"))
        assert (mine, peer) == pytest.approx((float(ours), float(dense)), rel=6e-3)
        ratios.append(mine / peer)
    low, high = re.search(r"([\d.]+)x to ([\d.]+)x", section).groups()
    assert (min(ratios), max(ratios)) == pytest.approx((float(low), float(high)), abs=6e-3)


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
    section = PAGE.split("### Training on four GPUs")[1].split("\n### ")[0]
    for (model, way), expected in quoted.items():
        one = [sum(losses) / 4 for losses in zip(*of_one_rank(model), strict=True)]
        for run, quote in zip(runs[model, way], expected, strict=True):
            every = sum(abs(b - a) / a for a, b in zip(one, run, strict=True)) / len(one)
            found = (100 * (sum(run[-20:]) / sum(one[-20:]) - 1), 100 * every)
            assert found == pytest.approx(quote, abs=6e-3), (model, way)
            if "one rank" not in way:
                assert f"{quote[0]:+.2f} %" in section, (model, way)
