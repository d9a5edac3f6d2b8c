"""Seconds that cases of the benchmark over several GPUs may take; its dry run."""

import csv
import shutil
from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.ranks_cases import ONE, Case, Grid
from benchmarks.ranks_costs import FEWEST, SET_UP, START, Costs

CP4 = Grid(1, 4)
LAYER = Case("layers", "v3.2", 65536)
NAMES = ("status", "part", "preset", "ratio", "tp", "cp", "rows", "operation", "median_ms")


@pytest.fixture
def earlier(tmp_path):
    """``earlier(*rows) -> path``: an earlier run's file, from ``tp, cp, rows, forward, step``."""

    def write(*rows, status="ok"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(NAMES)
            for tp, cp, count, *times in rows:
                for operation, ms in zip(("forward", "step"), times, strict=True):
                    writer.writerow([status, "layers", "v3.2", "", tp, cp, count, operation, ms])
        return path

    return write


def test_calls_of_a_case(earlier):
    """As many as the budget has room for, three at least; one step more, traced ranks two."""
    costs = Costs(5, 2.0, [earlier((1, 1, 65536, 300, 900), (1, 4, 65536, 100, 250))])
    assert FEWEST == 3
    assert costs.seconds(LAYER, ONE) == pytest.approx(SET_UP + 5 * 0.3 + (3 + 1) * 0.9)
    assert costs.seconds(LAYER, CP4) == pytest.approx(SET_UP + 5 * 0.1 + (5 + 2) * 0.25)
    chain = Case("layers", "v3.2", 65536, layers=4)
    assert costs.seconds(chain, ONE) == pytest.approx(SET_UP + 3 * 1.2 + (3 + 1) * 3.6)


def test_other_lengths_and_other_ranks(earlier):
    costs = Costs(1, 0.0, [earlier((1, 1, 32768, 100, 200), (1, 1, 65536, 300, 700))])
    once = costs.seconds(LAYER, ONE) - SET_UP
    assert once == pytest.approx(0.3 + 2 * 0.7)
    # Longer ones by the square, from the nearest; shorter ones in proportion.
    assert costs.seconds(Case("layers", "v3.2", 131072), ONE) - SET_UP == pytest.approx(4 * once)
    half = costs.seconds(Case("layers", "v3.2", 16384), ONE) - SET_UP
    assert half == pytest.approx((0.1 + 2 * 0.2) / 2)
    # Of four ranks, one may have half of the work.
    four = costs.seconds(LAYER, CP4) - SET_UP
    assert four == pytest.approx((0.3 + 3 * 0.7) / 2)
    assert costs.seconds(Case("layers", "v4-flash", 65536, ratio=4), ONE) is None


def test_what_this_run_measured_goes_first(earlier):
    files = [earlier((1, 4, 65536, 100, 250)), earlier((1, 4, 65536, 80, 200)), Path("none.csv")]
    costs = Costs(1, 0.0, [*files, earlier((1, 4, 65536, 1, 1), status="failed")])
    assert costs.seconds(LAYER, CP4) == pytest.approx(SET_UP + 0.08 + 3 * 0.2)  # the last file
    for operation in ("forward", "step"):
        costs.learn(Case("layers", "v3.2", 32768), ONE, operation, 1000.0)
    assert costs.seconds(LAYER, CP4) == pytest.approx(SET_UP + (1 + 3) * 4 / 2)
    for operation in ("forward", "step"):
        costs.learn(Case("layers", "v3.2", 32768, cp_layout="contiguous"), CP4, operation, 50.0)
    assert costs.seconds(LAYER, CP4) == pytest.approx(SET_UP + (1 + 3) * 0.2)


def test_a_dry_run_lists_all_cases(tmp_path, capsys, earlier, monkeypatch):
    """Whatever the GPUs: none is asked for, and nothing is written."""
    known = earlier((1, 1, 65536, 300, 700))
    monkeypatch.setattr(ranks, "EARLIER", ())
    output = tmp_path / "rows.csv"
    shutil.copy(known, output)
    before = output.read_bytes()
    ranks.main(["--grids", "tp1cp4", "--cases", "v3.2", "v4-flash-r4", "--rows", "65536",
                "--variants", "zigzag", "plain", "--dry-run", "--output", str(output)])  # fmt: skip
    *cases, total = capsys.readouterr().out.splitlines()
    assert len(cases) == 2 + 2 * 2 and output.read_bytes() == before
    (plain,) = (line for line in cases if "plain" in line and "v3.2" in line)
    own, four = 2 + 5 * 0.3 + 4 * 0.7, 2 + 5 * 0.15 + 7 * 0.35
    assert plain.split() == ["layers", "tp1cp4", "v3.2", "65536", "zigzag", "plain", "5", "s"]
    assert sum(line.endswith("unknown") for line in cases) == 3
    assert total.startswith(f"about {START + own + 2 * four:.0f} s of 240 s (--total)")
    assert total.endswith("how long 3 of 6 cases take is unknown")
