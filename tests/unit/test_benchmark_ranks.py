"""The benchmark over several GPUs: cases, traffic, traces, what a run does with answers."""

import csv
import math
import time

import pytest
import torch

from benchmarks import attention, ranks, ranks_run, ranks_traffic
from benchmarks.ranks_cases import ONE, Case, Grid
from benchmarks.ranks_costs import Costs
from benchmarks.ranks_pool import Ended
from benchmarks.ranks_traffic import STEP, communication_shares, length, outside, union

CP2, TP2 = Grid(1, 2), Grid(2, 1)

# Cases


def test_cases_of_a_full_run():
    plan = ranks.parse([]).plan
    assert list(plan) == [ONE, CP2, TP2]
    found = {grid: [(c.name, c.rows, c.cp_layout, c.tp_mode) for c in plan[grid]
                    if c.collectives == "overlapped"] for grid in plan}  # fmt: skip
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
        for mode in ("heads", "sequence")
    ]
    plain = [c for cases in plan.values() for c in cases if c.collectives == "plain"]
    assert plain == [Case("layers", "v3.2", 65536, heads=128, collectives="plain")]
    # Whatever is compared with one rank is measured on one, once.
    assert len(plan[ONE]) == len(set(plan[ONE])) == 8
    alone = {(c.name, c.rows) for c in plan[ONE]}
    assert alone == {(name, rows) for grid in (CP2, TP2) for name, rows, _, _ in found[grid]}


def test_cases_of_a_lean_run():
    """One layer, its lengths, its variants: nothing else but the one rank to compare with."""
    arguments = ["--grids", "tp1cp1", "tp1cp4", "--cases", "v3.2", "--rows", "65536", "131072"]
    plan = ranks.parse(arguments).plan
    assert list(plan) == [ONE, Grid(1, 4)]
    assert [(c.rows, c.layers) for c in plan[ONE]] == [(65536, 1), (131072, 1)]
    variants = [("zigzag", "overlapped"), ("contiguous", "overlapped"), ("zigzag", "plain")]
    found = [(c.rows, c.cp_layout, c.collectives) for c in plan[Grid(1, 4)]]
    assert found == [(rows, *variant) for rows in (65536, 131072) for variant in variants]
    # All of them need the same kernels.
    assert {c.compiled() for c in plan[Grid(1, 4)]} == {c.compiled() for c in plan[ONE]}
    arguments += ["--variants", "plain", "zigzag", "--layers", "3"]
    plan = ranks.parse([*arguments, "--cases", "v4-flash-r4"]).plan
    found = [(c.rows, c.cp_layout, c.collectives, c.layers) for c in plan[Grid(1, 4)]]
    assert found == [(rows, "zigzag", kind, 3) for rows in (65536, 131072)
                     for kind in ("overlapped", "plain")]  # fmt: skip
    assert [c.layers for c in plan[ONE]] == [3, 3]


def test_simulated_ranks():
    arguments = ["--simulate", "4", "8", "--cases", "--grids"]
    (only,) = ranks.parse(arguments).plan.values()
    assert {c.part for c in only} == {"exchange", "simulated"}
    plan = ranks.parse([*arguments, "tp2cp1"]).plan
    cores = [(c.rows, c.simulated, c.tp_mode) for c in plan[ONE]]
    modes = [(1, "heads"), (4, "heads"), (4, "sequence"), (8, "heads"), (8, "sequence")]
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
        (["--variants", "plain"], "must have one of heads, rows for the grid tp2cp1"),
        (["--layers", "0"], "must be positive, got 0"),
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


def test_parts_of_different_sizes(monkeypatch):
    """Of an all-to-all with sizes of its own, a rank's part for itself does not leave it."""
    distributed, half = torch.distributed, torch.zeros(6, 5, dtype=torch.bfloat16)

    def collective(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
        pass

    monkeypatch.setattr(distributed, "all_to_all_single", collective)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 3)
    monkeypatch.setattr(distributed, "get_rank", lambda group: 1)
    with ranks_traffic.counted() as traffic:
        for splits in ([6, 0, 0], [4, 2, 0], [0, 6, 0]):
            distributed.all_to_all_single(half, half, [2, 2, 2], splits)
        distributed.all_to_all_single(half[:0], half[:0], [0, 0, 0], [0, 0, 0])
        distributed.all_to_all_single(half, half)
    assert [sent for _, sent in traffic.calls] == pytest.approx([60, 40, 0, 0, 40])


def test_exchanged_bytes_of_simulated_ranks():
    simulated = pytest.importorskip("benchmarks.ranks_simulated")
    case = Case("exchange", "v3.2", 8192, tp_mode="sequence", simulated=4)
    found = simulated.exchanges(case)
    part = 8192 // 4 * 128 * 2 * 3 // 4
    assert found == [("all_to_all", part * dim) for dim in (192, 128, 192, 128)]
    case = Case("exchange", "v3.2", 8192, tp_mode="heads", simulated=4)
    assert simulated.exchanges(case) == [("all_reduce", 2 * 3 / 4 * 8192 * 2048 * 4)]


def test_simulated_rank_scores_what_balanced_ranks_do():
    simulated = pytest.importorskip("benchmarks.ranks_simulated")
    case = Case("exchange", "v3.2", 32768, tp_mode="sequence", simulated=8)
    own, scored = simulated.rank_layouts(case, torch.device("cpu"))
    pairs = [int((layout.end - layout.start).sum()) for layout in (own, *scored)]
    assert sum(layout.num_queries for layout in scored) == own.num_queries == 4096
    mean = 32768 * 32769 // 2 // 8
    assert pairs[0] > 1.8 * mean and sum(pairs[1:]) == pytest.approx(mean, rel=1e-3)
    # Half of the rows travel: 64 queries of 128, 64 weights, and 2048 indices back.
    assert simulated.exchanges(case)[-1] == ("all_to_all", 2048 * (64 * 129 * 2 + 2048 * 4))


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
    forward, step = ranks_run.merge(
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
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        attention.open_csv(output, ranks_run.COLUMNS)
        settings = {"repeats": 2, "budget": 1.0, "workspace_mib": 1}
        ends, costs = time.time() + total, Costs(settings["repeats"], settings["budget"])
        ranks_run.Run(settings, output, 60, ends, costs, FakePool).measure(
            ranks.parse(arguments).plan, gpus
        )
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(tuple(row) == ranks_run.COLUMNS for row in rows)
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


def test_what_there_is_no_time_for_is_skipped(scripted):
    rows, log = scripted(TWO_LENGTHS, [], total=-1)
    assert [row["status"] for row in rows] == ["skipped"] * 4
    assert all("--total" in row["reason"] for row in rows)
    assert ("tp1cp2", "measure", 512) not in log
    # One rank's 6 and 30 seconds are 24 and 120 of twice the length, two calls of each and one step
    # to begin with; two ranks' 1 and 2 are 4 and 8, and one step more is traced.
    alone, both = answers([[6e3]], [[30e3]]), answers([[1e3]] * 2, [[2e3]] * 2)
    rows, _ = scripted(TWO_LENGTHS, [alone, both, both], total=300)
    assert [(row["grid"], row["rows"], row["status"]) for row in rows] == [
        *[("tp1cp1", "512", "ok")] * 2, *[("tp1cp2", "512", "ok")] * 2,
        ("tp1cp1", "1024", "skipped"), ("tp1cp2", "1024", "ok"), ("tp1cp2", "1024", "ok")
    ]  # fmt: skip
    assert "may take 410 s, " in rows[4]["reason"]
    # Until two ranks have been measured, one of them may have as much to do as one alone.
    rows, _ = scripted(TWO_LENGTHS, [alone], total=41)
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped", "skipped", "skipped"]
    assert "may take 134 s" in rows[2]["reason"]


def test_grids_that_need_more_gpus_are_skipped(scripted):
    rows, log = scripted(ONE_LENGTH, [answers([[6.0]], [[30.0]])], gpus=1)
    assert [row["status"] for row in rows] == ["skipped", "ok", "ok"]
    assert rows[0]["reason"] == "tp1cp2 needs 2 GPUs, there are 1"
    assert {entry[0] for entry in log} == {"tp1cp1"}
