"""The processes of the benchmark over several GPUs: failures, and a tiny run over gloo."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ranks_pool
from benchmarks.ranks_cases import LAYERS, ONE, Grid
from benchmarks.ranks_pool import Ended, Pool

ROOT = Path(__file__).resolve().parents[2]
CP2 = Grid(1, 2)

#: Ranks that do what they are told to: of a module of its own, which imports nothing.
ACTORS = """
import os, time
def act(rank, grid, store, settings, pipe):
    pipe.send({"status": "ok", "rank": rank})
    while True:
        try:
            what, _ = pipe.recv()
        except EOFError:
            return
        if what == "lack" or what == "lack on one" and rank == 1:
            pipe.send({"status": "out of memory", "reason": f"rank {rank}"})
        elif what == "lack on one" or what == "hang" and rank == 0:
            time.sleep(600)
        elif what == "die" and rank == 1:
            os.abort()
        else:
            pipe.send({"status": "ok", "rank": rank})
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "rank_actors.py").write_text(ACTORS)
    monkeypatch.syspath_prepend(tmp_path)
    act = importlib.import_module("rank_actors").act
    monkeypatch.setattr(ranks_pool, "GRACE", 0.5)
    started = []

    def start(grid, timeout=60.0):
        started.append(Pool(grid, {}, timeout, act))
        assert [a["rank"] for a in started[-1].answers()] == list(range(grid.ranks))
        return started[-1]

    yield start
    for one in started:
        one.stop()
    sys.modules.pop("rank_actors")


def test_a_rank_that_waits_for_one_without_memory_is_ended(pool):
    grid = pool(CP2)
    grid.ask("measure", [])
    assert [answer["rank"] for answer in grid.answers()] == [0, 1]
    grid.ask("lack on one", [])
    with pytest.raises(Ended, match="rank 1") as found:
        grid.answers()
    assert found.value.status == "out of memory" and found.value.gone
    assert not any(process.is_alive() for process in grid._processes)


def test_a_rank_that_dies_or_hangs_is_named(pool):
    grid = pool(CP2)
    grid.ask("die", [])
    with pytest.raises(Ended, match="process of rank 1 ended by signal 6") as found:
        grid.answers()
    assert found.value.status == "failed" and found.value.gone
    grid = pool(CP2)
    grid.timeout = 0.5
    grid.ask("hang", [])
    with pytest.raises(Ended, match=r"no answer of rank 0 in 0.5 s \(--timeout\)"):
        grid.answers()


def test_one_rank_goes_on_after_a_lack_of_memory(pool):
    grid = pool(ONE)
    grid.ask("lack", [])
    with pytest.raises(Ended) as found:
        grid.answers()
    assert found.value.status == "out of memory" and not found.value.gone
    grid.ask("measure", [])
    assert grid.answers() == [{"status": "ok", "rank": 0}]


def test_what_libraries_say_about_memory():
    from benchmarks.ranks_worker import failure

    assert failure(torch.OutOfMemoryError("x"))["status"] == "out of memory"
    nccl = failure(RuntimeError("NCCL error: CUDA failure 2 'out of memory'\nmore"))
    assert nccl["status"] == "out of memory" and "more" not in nccl["reason"]
    assert failure(ValueError("shape")) == {"status": "failed", "reason": "ValueError: shape"}


# The whole


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The rows of a quick run from the command line, and its CSV."""
    output = tmp_path_factory.mktemp("ranks") / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.ranks", "--quick", "--simulate", "2",
               "--layers", "2", "--total", "900", "--timeout", "400",
               "--output", str(output)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with output.open(newline="") as file:
        return list(csv.DictReader(file)), output


def test_a_quick_run_measures_everything(quick):
    rows, _ = quick
    assert [row["reason"] for row in rows if row["status"] != "ok"] == []
    names = ("part", "grid", "tp", "cp", "preset", "ratio", "layers", "cp_layout", "tp_mode",
             "collectives", "operation")  # fmt: skip
    found = [tuple(row[name] for name in names) for row in rows]
    assert len(found) == len(set(found))
    layers = [("tiny", ""), ("tiny", "4"), ("tiny", "128")]
    assert len(layers) == sum(name.startswith("tiny") for name in LAYERS)
    expected = set()
    for operation in ("forward", "step"):
        for layer in layers:
            expected |= {("layers", "tp1cp1", "1", "1", *layer, "2", "", "", "", operation)}
            expected |= {("layers", "tp1cp2", "1", "2", *layer, "2", "zigzag", "", "overlapped",
                          operation)}  # fmt: skip
            expected |= {("layers", "tp2cp1", "2", "1", *layer, "2", "", mode, "overlapped",
                          operation) for mode in ("heads", "sequence")}  # fmt: skip
        expected |= {("layers", "tp1cp2", "1", "2", "tiny", "", "2", layout, "", collectives,
                      operation) for layout, collectives in
                     (("contiguous", "overlapped"), ("zigzag", "plain"))}  # fmt: skip
        expected |= {("simulated", "tp1cp1", "1", "1", "tiny", "", "", "", "", "", operation)}
        expected |= {("simulated", "tp1cp1", "2", "1", "tiny", "", "", "", mode, "", operation)
                     for mode in ("heads", "sequence")}  # fmt: skip
    expected |= {("exchange", "tp1cp2", "2", "1", "tiny", "", "", "", mode, "", "exchange")
                 for mode in ("heads", "sequence")}  # fmt: skip
    assert set(found) == expected


def test_quick_rows_are_whole(quick):
    rows, _ = quick
    steps = 0
    for row in rows:
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        assert row["repeats"] == "2" and row["rows"] == "256" and row["gpu"].startswith("CPU")
        if row["part"] == "exchange":
            assert float(row["bytes"]) > 0
            continue
        ran = "sparse_attention_backward=torch" in row["ran"]
        assert ran == (row["operation"] == "step") and float(row["efficiency"]) > 0
        if row["part"] == "layers":
            # As far as bf16 goes, any number of ranks computed the same. Tensor-parallel ranks add
            # up their parts of a layer's output, by which the next one may select other keys.
            assert float(row["norm_error"]) < (1e-3 if row["tp"] == "1" else 1e-2)
        if row["grid"] != "tp1cp1" and row["operation"] == "step":
            assert float(row["bytes_per_token"]) == float(row["formula_bytes_per_token"]) > 0
            assert row["exposed_share"] == ""  # no NCCL on the CPU
            steps += 1
    assert steps == 5 + 6


def test_bytes_of_context_parallel_dsa(quick):
    """A token's latent (16 + 8) and index key (16): bf16 to the other rank, fp32 back.

    Of contiguous parts every second token is scored by the other rank: index query and weights (3
    heads) in bf16 there, 12 selected keys back.
    """
    rows, _ = quick
    found = [row for row in rows if (row["grid"], row["ratio"], row["operation"]) ==
             ("tp1cp2", "", "step")]  # fmt: skip
    how = [(row["cp_layout"], row["collectives"]) for row in found]
    assert how == [("zigzag", "overlapped"), ("contiguous", "overlapped"), ("zigzag", "plain")]
    for row in found:
        balanced = 3 * (16 + 1) * 2 + 12 * 4 if row["cp_layout"] == "contiguous" else 0
        assert float(row["bytes_per_token"]) == (16 + 8 + 16) * (2 + 4) + balanced / 2
        # Its hidden state, and the gradient of that.
        assert float(row["hidden_bytes_per_token"]) == 32 * (2 + 2)


def test_charts(quick):
    charts = pytest.importorskip("benchmarks.ranks_charts").draw_ranks(quick[1])
    assert [chart.name for chart in charts] == ["rows_layers.png", "rows_simulated.png"]
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in charts)
