"""The benchmark over several GPUs: cases, traffic, traces, failures, a tiny run over gloo."""

import csv
import importlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import ranks, ranks_pool, ranks_traffic
from benchmarks.ranks_cases import LAYERS, ONE, Case, Grid
from benchmarks.ranks_pool import Ended, Pool
from benchmarks.ranks_traffic import STEP, communication_shares, length, outside, union

ROOT = Path(__file__).resolve().parents[2]
CP2, TP2 = Grid(1, 2), Grid(2, 1)

# Cases


def test_cases_of_a_full_run():
    plan = ranks.parse([]).plan
    assert list(plan) == [ONE, CP2, TP2]
    found = {grid: [(c.name, c.rows, c.cp_layout, c.tp_mode) for c in plan[grid]] for grid in plan}
    assert found[CP2] == [
        ("v3.2", 32768, "zigzag", "auto"),
        ("v3.2", 65536, "zigzag", "auto"),
        ("v3.2", 65536, "contiguous", "auto"),
        ("v4-flash-r4", 65536, "zigzag", "auto"),
        ("v4-flash-r128", 65536, "zigzag", "auto"),
        ("v3.2", 131072, "zigzag", "auto"),
    ]
    assert found[TP2] == [
        (name, rows, "zigzag", mode)
        for rows in (8192, 32768)
        for name in ("v3.2", "v3.2-h32")
        for mode in ("heads", "rows")
    ]
    # Whatever is compared with one rank is measured on one, once.
    assert len(plan[ONE]) == len(set(plan[ONE])) == 8
    alone = {(c.name, c.rows) for c in plan[ONE]}
    assert alone == {(name, rows) for grid in (CP2, TP2) for name, rows, _, _ in found[grid]}


def test_simulated_ranks():
    arguments = ["--simulate", "4", "8", "--cases", "--grids"]
    (only,) = ranks.parse(arguments).plan.values()
    assert {c.part for c in only} == {"exchange", "simulated"}
    plan = ranks.parse([*arguments, "tp2cp1"]).plan
    cores = [(c.rows, c.simulated, c.tp_mode) for c in plan[ONE]]
    modes = [(1, "heads"), (4, "heads"), (4, "rows"), (8, "heads"), (8, "rows")]
    assert cores == [(rows, *mode) for rows in (8192, 32768) for mode in modes]
    sent = [(c.rows, c.simulated, c.tp_mode) for c in plan[TP2]]
    assert sent == [core for core in cores if core[1] > 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grids", "cp2"], "a grid must be tp<ranks>cp<ranks>"),
        (["--rows", "8192", "300"], "multiples of 256 for these grids, got 300"),
        (["--simulate", "3"], "must divide the heads and be 2 at least, got 3"),
        (["--cases", "v5"], "invalid choice: 'v5'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        ranks.parse(arguments)
    assert message in capsys.readouterr().err


# Traffic and traces


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7), (0, 1)]) == [(0, 4), (5, 6)]
    assert length(union([(0, 4), (5, 6), (1, 2)])) == 5
    assert union([]) == [] and length([]) == 0
    # Before, over the beginning of, inside of, between and behind others.
    ours = [(0, 1), (2, 4), (5, 6), (9, 11), (20, 21)]
    assert outside(ours, [(3, 8), (10, 12)]) == 1 + 1 + 0 + 1 + 1
    assert outside(ours, []) == length(ours) == 7
    assert outside(ours, [(0, 30)]) == 0


def event(cat, name, ts, dur):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_shares_of_communication():
    kernels = [
        # Of the agreement that came before the step.
        event("kernel", "ncclDevKernel_AllReduce_Min", 50, 40),
        event("kernel", "gemm", 100, 10),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 105, 15),
        event("gpu_memcpy", "Memcpy DtoD", 118, 4),
        event("kernel", "gemm", 130, 40),
        event("kernel", "ncclDevKernel_ReduceScatter", 140, 10),
        event("kernel", "ncclDevKernel_SendRecv", 180, 20),
        event("cpu_op", "aten::mm", 100, 500),
    ]
    step = event("user_annotation", STEP, 95, 50)
    assert communication_shares([*kernels, step]) == {
        "communication_share": (15 + 10 + 20) / 100,
        "exposed_share": (8 + 20) / 100,
    }
    with pytest.raises(RuntimeError, match="recorded no range"):
        communication_shares(kernels)
    with pytest.raises(RuntimeError, match="recorded no kernels"):
        communication_shares([kernels[0], step])


def test_rules_of_counting(monkeypatch):
    """Four ranks in a ring; other tensors of a call do not count, and everything is put back."""
    called = []

    def collective(output_tensor, input_tensor, group=None, async_op=False):
        called.append(group)

    distributed = torch.distributed
    monkeypatch.setattr(distributed, "all_gather_into_tensor", collective)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 4 if group == "four" else 1)
    small, large = torch.zeros(10, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.bfloat16)
    with ranks_traffic.counted() as traffic:
        distributed.all_gather_into_tensor(large, small, "four")
        distributed.all_gather_into_tensor(large, input_tensor=small, group="four")
        distributed.all_gather_into_tensor(small, small, group="alone")
    assert traffic.calls == [("all_gather_into_tensor", 3 * 20)] * 2 and traffic.bytes == 120
    assert distributed.all_gather_into_tensor is collective
    assert called == ["four", "four", "alone"]
    assert ranks_traffic.reduce(20, 4) == 60  # of 80 bytes, 20 are a rank's own
    assert ranks_traffic.exchange(80, 4) == 60
    assert ranks_traffic.sum_everywhere(80, 4) == 120


def test_exchanged_bytes_of_simulated_ranks():
    simulated = pytest.importorskip("benchmarks.ranks_simulated")
    case = Case("exchange", "v3.2", 8192, tp_mode="rows", simulated=4)
    found = simulated.exchanges(case)
    part = 8192 // 4 * 128 * 2 * 3 // 4
    assert found == [("all_to_all", part * dim) for dim in (192, 128, 192, 128)]
    case = Case("exchange", "v3.2", 8192, tp_mode="heads", simulated=4)
    assert simulated.exchanges(case) == [("all_reduce", 2 * 3 / 4 * 8192 * 2048 * 4)]


# Putting answers together


def answers(forward, step, out=1.0, **more):
    """Answers of as many ranks as there are lists."""
    return [
        {"status": "ok", "times": {"forward": f, "step": s}, "heads": 4, "ran": "x=y",
         "warm_up_s": 0.0, "squares": {"out": out / len(step), "dx": 4.0 / len(step)},
         **{name: value[rank] for name, value in more.items()}}
        for rank, (f, s) in enumerate(zip(forward, step, strict=True))
    ]  # fmt: skip


def test_the_slowest_rank_counts():
    forward, step = ranks.merge(
        answers([[1, 5, 3], [2, 4, 1]], [[10, 10, 10], [30, 20, 10]], peak_mib=[7, 9],
                exposed_share=[0.2, 0.1])
    )  # fmt: skip
    assert (forward["operation"], forward["median_ms"], forward["repeats"]) == ("forward", 3, 3)
    assert forward["p10_ms"] == pytest.approx(2.2) and forward["p90_ms"] == pytest.approx(4.6)
    assert (step["operation"], step["median_ms"], step["peak_mib"]) == ("step", 20, 9)
    assert step["exposed_share"] == 0.2 and step["bytes_per_token"] is None
    assert "peak_mib" not in forward


class FakePool:
    """Answers what it was told to, in the order of requests, over all pools."""

    script: list = []  # noqa: RUF012
    log: list = []  # noqa: RUF012

    def __init__(self, grid, settings, timeout):
        self.grid, self.todo = grid, [[{"status": "ok", "environment": {"gpu": "test"}}]]
        self.log.append((grid.name, "start"))

    def ask(self, what, cases):
        self.log.append((self.grid.name, what, *(case.rows for case in cases)))
        self.todo.append([{"status": "ok"}] if what == "prepare" else self.script.pop(0))

    def answers(self):
        answer = self.todo.pop(0)
        if isinstance(answer, Ended):
            raise answer
        return answer

    def stop(self):
        self.log.append((self.grid.name, "stop"))


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """``scripted(arguments, script, gpus) -> rows, log``: a run without processes."""

    def run(arguments, script, gpus=None, total=1e6):
        monkeypatch.setattr(FakePool, "script", list(script))
        monkeypatch.setattr(FakePool, "log", [])
        output = tmp_path / "rows.csv"
        ranks.attention.open_csv(output, ranks.COLUMNS)
        settings = {"repeats": 2, "budget": 1.0, "workspace_mib": 1}
        ranks.Run(settings, output, 60, time.time() + total, FakePool).measure(
            ranks.parse(arguments).plan, gpus
        )
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(tuple(row) == ranks.COLUMNS for row in rows)
        assert FakePool.script == []  # all of it was asked for
        return rows, FakePool.log

    return run


ONE_LENGTH = ["--grids", "tp1cp2", "--cases", "v3.2-h32", "--rows", "512"]
TWO_LENGTHS = [*ONE_LENGTH, "1024"]


def test_efficiency_refers_to_one_rank(scripted):
    alone, both = answers([[6.0]], [[30.0]]), answers([[4.0], [2.0]], [[10.0], [20.0]])
    rows, log = scripted(ONE_LENGTH, [alone, both])
    found = [(row["grid"], row["operation"], float(row["efficiency"])) for row in rows]
    assert found == [
        ("tp1cp1", "forward", 1.0), ("tp1cp1", "step", 1.0),
        ("tp1cp2", "forward", 0.75), ("tp1cp2", "step", 0.75),
    ]  # fmt: skip
    assert {row["norm_error"] for row in rows} == {"0.0"} and rows[0]["gpu"] == "test"
    # All are there, and have compiled, before anything counts.
    assert log == [
        ("tp1cp1", "start"), ("tp1cp2", "start"), ("tp1cp1", "prepare", 512),
        ("tp1cp2", "prepare", 512), ("tp1cp1", "measure", 512), ("tp1cp1", "stop"),
        ("tp1cp2", "measure", 512), ("tp1cp2", "stop"),
    ]  # fmt: skip


@pytest.mark.parametrize("out", [1.1, 0.0, math.nan])
def test_another_result_is_no_result(scripted, out):
    alone, both = answers([[6.0]], [[30.0]]), answers([[1.0]] * 2, [[1.0]] * 2, out=out)
    rows, _ = scripted(ONE_LENGTH, [alone, both])
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "failed"]
    assert all("norms differ" in row["reason"] and not row["median_ms"] for row in rows[2:])


def test_lack_of_memory_is_recorded_and_the_rest_goes_on(scripted):
    alone, both = answers([[6.0]], [[30.0]]), answers([[4.0]] * 2, [[20.0]] * 2)
    lacks = Ended("out of memory", "OutOfMemoryError: CUDA", gone=False)
    rows, log = scripted(TWO_LENGTHS, [lacks, both, alone, Ended("out of memory", "rank 1")])
    found = [(row["grid"], row["rows"], row["status"], bool(row["efficiency"])) for row in rows]
    assert found == [
        ("tp1cp1", "512", "out of memory", False),
        *[("tp1cp2", "512", "ok", False)] * 2,  # nothing to refer to
        *[("tp1cp1", "1024", "ok", True)] * 2,
        ("tp1cp2", "1024", "out of memory", False),
    ]
    assert rows[0]["reason"] == "OutOfMemoryError: CUDA" and not rows[0]["median_ms"]
    # One rank goes on in its process.
    assert log.count(("tp1cp1", "start")) == 1


def test_a_grid_that_ended_is_started_anew(scripted):
    alone, both = answers([[6.0]], [[30.0]]), answers([[4.0]] * 2, [[20.0]] * 2)
    rows, log = scripted(TWO_LENGTHS, [alone, Ended("failed", "signal 6"), alone, both])
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "ok", "ok", "ok", "ok"]
    assert rows[2]["reason"] == "signal 6" and log.count(("tp1cp2", "start")) == 2


def test_what_there_is_no_time_for_is_skipped(scripted, monkeypatch):
    rows, log = scripted(TWO_LENGTHS, [], total=-1)
    assert [row["status"] for row in rows] == ["skipped"] * 4
    assert all("--total" in row["reason"] for row in rows)
    assert ("tp1cp2", "measure", 512) not in log
    # Ten seconds of the short ones are forty of the long ones, which do not fit any more.
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(ranks.time, "time", lambda: float(next(clock)))
    alone, both = answers([[6.0]], [[30.0]]), answers([[4.0]] * 2, [[20.0]] * 2)
    rows, _ = scripted(TWO_LENGTHS, [alone, both], total=75)
    assert [row["status"] for row in rows[4:]] == ["ok"] * 4 + ["skipped"] * 2
    assert "may take 40 s" in rows[-1]["reason"]


def test_grids_that_need_more_gpus_are_skipped(scripted):
    rows, log = scripted(ONE_LENGTH, [answers([[6.0]], [[30.0]])], gpus=1)
    assert [row["status"] for row in rows] == ["skipped", "ok", "ok"]
    assert rows[0]["reason"] == "tp1cp2 needs 2 GPUs, there are 1"
    assert {entry[0] for entry in log} == {"tp1cp1"}


# Processes

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
               "--total", "900", "--timeout", "400", "--output", str(output)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with output.open(newline="") as file:
        return list(csv.DictReader(file)), output


def test_a_quick_run_measures_everything(quick):
    rows, _ = quick
    assert [row["reason"] for row in rows if row["status"] != "ok"] == []
    names = ("part", "grid", "tp", "cp", "preset", "ratio", "cp_layout", "tp_mode", "operation")
    found = [tuple(row[name] for name in names) for row in rows]
    assert len(found) == len(set(found))
    layers = [("tiny", ""), ("tiny", "4"), ("tiny", "128")]
    assert len(layers) == sum(name.startswith("tiny") for name in LAYERS)
    expected = set()
    for operation in ("forward", "step"):
        for layer in layers:
            expected |= {("layers", "tp1cp1", "1", "1", *layer, "", "", operation)}
            expected |= {("layers", "tp1cp2", "1", "2", *layer, "zigzag", "", operation)}
            expected |= {("layers", "tp2cp1", "2", "1", *layer, "", mode, operation)
                         for mode in ("heads", "rows")}  # fmt: skip
        expected |= {("layers", "tp1cp2", "1", "2", "tiny", "", "contiguous", "", operation)}
        expected |= {("simulated", "tp1cp1", "1", "1", "tiny", "", "", "", operation)}
        expected |= {("simulated", "tp1cp1", "2", "1", "tiny", "", "", mode, operation)
                     for mode in ("heads", "rows")}  # fmt: skip
    expected |= {("exchange", "tp1cp2", "2", "1", "tiny", "", "", mode, "exchange")
                 for mode in ("heads", "rows")}  # fmt: skip
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
            # As far as bf16 goes, any number of ranks computed the same.
            assert float(row["norm_error"]) < 1e-3
        if row["grid"] != "tp1cp1" and row["operation"] == "step":
            assert float(row["bytes_per_token"]) == float(row["formula_bytes_per_token"]) > 0
            assert row["exposed_share"] == ""  # no NCCL on the CPU
            steps += 1
    assert steps == 4 + 6


def test_bytes_of_context_parallel_dsa(quick):
    """A token's latent (16 + 8) and index key (16): bf16 to the other rank, fp32 back."""
    rows, _ = quick
    found = [row for row in rows if (row["grid"], row["ratio"], row["operation"]) ==
             ("tp1cp2", "", "step")]  # fmt: skip
    assert [row["cp_layout"] for row in found] == ["zigzag", "contiguous"]
    for row in found:
        assert float(row["bytes_per_token"]) == (16 + 8 + 16) * (2 + 4)


def test_charts(quick):
    charts = pytest.importorskip("benchmarks.ranks_charts").draw_ranks(quick[1])
    assert [chart.name for chart in charts] == ["rows_layers.png", "rows_simulated.png"]
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in charts)
