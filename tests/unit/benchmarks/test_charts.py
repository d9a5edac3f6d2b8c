"""Charts: all are drawn from the committed files, with right figures."""

import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.charts import convergence, draw_all
from benchmarks.charts.drawing import Point
from benchmarks.charts.layers import GROUPS, break_even, layer_bars
from benchmarks.tracing import PRODUCTS
from megatron_dsa.ops import OPERATIONS

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def test_every_committed_chart_is_drawn(tmp_path):
    for file in (*FOLDER.glob("*.csv"), *FOLDER.glob("*.jsonl")):
        shutil.copy(file, tmp_path)
    written = draw_all(tmp_path)
    assert {file.name for file in written} == {file.name for file in FOLDER.glob("*.png")}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


def point(case=None, part="step", way="ours", **values):
    versions = {"torch": "2.11", "cuda": "13.0", "cudnn_frontend": "1.32", "flash_mla": "unknown"}
    return Point(case or {}, part, way, "GPU 9000", versions, values)


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [
        # Ratios 1/2 and 2: half way, in logarithms.
        ({4: 2.0, 16: 2.0}, {4: 1.0, 16: 4.0}, 8),
        # Never slower, except at the end.
        ({4: 1.0, 8: 1.0}, {4: 1.0, 8: 3.0}, 4),
        ({4: 1.0, 8: 2.0}, {4: 2.0, 8: 1.0}, None),
        # Common lengths only, and the last crossing.
        ({4: 1.0, 8: 2.0, 32: 1.0, 64: 9.0}, {2: 9.0, 4: 9.0, 8: 1.0, 32: 2.0}, 16),
        ({4: 1.0}, {8: 1.0}, None),
    ],
)
def test_break_even_by_hand(ours, peer, expected):
    found = break_even(ours, peer)
    assert found == (None if expected is None else pytest.approx(expected))


def test_shares_are_grouped():
    known = {name for names in GROUPS.values() for name in names}
    assert known <= {*OPERATIONS, PRODUCTS}
    case = {"preset": "v3.2", "tokens": 4096, "heads": 16}
    times = {"indexer_topk": 3.0, "sparse_indexer_loss": 1.0, "other": 2.0,
             "sparse_attention_probabilities": 4.0, "a new one": 0.5}  # fmt: skip
    points = [point(case, f"step/{name}", ms=ms) for name, ms in times.items()]
    points += [point(case, ms=99.0), point(case, "forward", ms=9.0)]
    ((label, groups),) = layer_bars(points).items()
    assert label == "16 heads, 4k" and sum(groups.values()) == 10.5
    assert groups["selection"] == 3 and groups["indexer loss and its backward"] == 5
    assert groups["rope, norms, copies"] == 2.5
    # Ranks have bars if their attention is an operation.
    points += [
        point(case, "step/other", way, ms=4.0) for way in ("masked-rank", "dense-rank")
    ]  # fmt: skip
    assert list(layer_bars(points)) == ["16 heads, 4k", "16 heads, 4k, masked-rank"]
    # Ordered by heads and tokens; labels mention masked dense attention.
    points += [
        point(case | changes, "step/masked_attention_forward", ms=1.0)
        for changes in ({"tokens": 8192}, {"heads": 64})
    ]
    assert list(layer_bars(points)) == [
        "64 heads, 4k, masked", "16 heads, 4k", "16 heads, 4k, masked-rank",
        "16 heads, 8k, masked",
    ]  # fmt: skip


def test_the_gap_is_taken_seed_by_seed():
    losses = {
        ("dense", 1): (3.0, 2.0), ("dense", 2): (3.5, 2.5),
        ("sparse", 1): (3.1, 2.1), ("sparse", 2): (3.7, 2.8), ("sparse", 3): (9.0, 9.0),
    }  # fmt: skip
    points = [
        point({"run": seed}, str(step), way, validation_loss=bits * math.log(2))
        for (way, seed), curve in losses.items()
        for step, bits in zip((10, 20), curve, strict=True)
    ]
    assert convergence.gaps(points, "sparse") == {
        10: pytest.approx([0.1, 0.2]),
        20: pytest.approx([0.1, 0.3]),
    }
    low, high = convergence.noise(points)
    assert low == pytest.approx({10: -0.25, 20: -0.25})
    assert high == pytest.approx({10: 0.25, 20: 0.25})
