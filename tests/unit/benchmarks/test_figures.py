"""Figures that the documentation quotes are in the committed CSVs, where a reader looks."""

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
    ("ranks", {"kind": "layers", "preset": "v3.2", "tokens": 65536, "cp": 2}, "zigzag", "step",
     "ms", 449),
    ("ranks", {"kind": "layers", "preset": "v3.2", "tokens": 131072, "cp": 4}, "plain", "step",
     "efficiency", 0.94),
    ("ranks", {"kind": "layers", "preset": "v3.2", "tokens": 131072, "tp": 4}, "rows", "step",
     "exposed_share", 0.27),
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
