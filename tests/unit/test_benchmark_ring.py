"""The benchmark of dense attention over several GPUs: its command line, its rows, a tiny run."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ring
from benchmarks.ranks_cases import ONE, Grid

ROOT = Path(__file__).resolve().parents[2]
CP2 = Grid(1, 2)


def test_plan():
    plan = ring.plan(ring.parse(["--rows", "64", "128"]), 4)
    assert list(plan) == [ONE, Grid(1, 4)]
    assert [(s.rows, s.variant) for s in plan[ONE]] == [(64, "ring"), (128, "ring")]
    found = [(s.rows, s.heads, s.variant) for s in plan[Grid(1, 4)]]
    assert found == [(rows, 128, name) for rows in (64, 128) for name in ring.VARIANTS]
    assert list(ring.plan(ring.parse(["--quick"]), None)) == [ONE, CP2]


@pytest.mark.parametrize(
    ("arguments", "there", "message"),
    [
        ([], 1, "--gpus must be 2 at least and not more than there are, got 1"),
        (["--gpus", "4"], 2, "not more than there are, got 4"),
        (["--rows", "64", "60"], 4, "multiples of 8, got 60"),
    ],
)
def test_what_cannot_be_is_refused(arguments, there, message):
    with pytest.raises(SystemExit, match=message):
        ring.plan(ring.parse(arguments), there)


def test_rows_by_hand():
    """The slowest rank of every call; efficiency by one GPU's time; causal products only."""
    environment = {"gpu": "test", "torch": "2", "cuda": None, "driver": None, "package": "x"}
    alone = {}
    one = {"block": "b", "difference": 0.0, "times": {"forward": [8.0], "step": [24.0]}}
    ring.rows_of(ring.Setup(ONE, 64, 2, "ring"), environment, [one], alone)
    both = [
        {"block": "b", "difference": 0.1, "times": {"forward": [5, 1, 5], "step": [10, 20, 30]}},
        {"block": "b", "difference": 0.2, "times": {"forward": [1, 5, 5], "step": [20, 10, 10]}},
    ]
    forward, step = ring.rows_of(ring.Setup(CP2, 64, 2, "ring"), environment, both, alone)
    assert set(forward) == set(ring.FIELDS)
    assert (forward["median_ms"], forward["repeats"], forward["gpus"]) == (5, 3, 2)
    assert forward["efficiency"] == pytest.approx(8 / 2 / 5)
    assert step["median_ms"] == 20 and step["efficiency"] == pytest.approx(24 / 2 / 20)
    assert step["difference"] == 0.2
    # Half of 64 x 64 pairs, 192 multiply-adds of a score and 128 of a value, 2 heads, 2 ranks.
    work = 64 * 64 / 2 * 2 * (192 + 128) * 2 / 2
    assert forward["tflops_per_gpu"] == pytest.approx(work / 5e-3 / 1e12)
    assert step["tflops_per_gpu"] == pytest.approx(3.5 * work / 20e-3 / 1e12)


def test_a_quick_run(tmp_path):
    output = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.ring", "--quick", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["gpus"], row["variant"], row["operation"]) for row in rows]
    expected = [("1", "ring"), *(("2", name) for name in ring.VARIANTS)]
    assert found == [(*one, operation) for one in expected for operation in ("forward", "step")]
    for row in rows:
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        assert row["rows"] == "64" and row["heads"] == "2" and row["gpu"].startswith("CPU")
        assert float(row["efficiency"]) > 0 and float(row["tflops_per_gpu"]) > 0
        # The latent and what it expands to are the same keys and values, but for bf16.
        assert float(row["difference"]) < 1e-2
