"""The family ``ranks``: cases, traffic, what answers of all ranks come to, plain collectives."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ranks
from benchmarks.__main__ import plan_of
from benchmarks.ranks import traffic as traffic_of
from benchmarks.ranks.cases import ONE_RANK, ONE_RANK_DENSE, ONE_RANK_MASKED, Case, Grid
from benchmarks.ranks.exposed import (
    STEP,
    communication_shares,
    length,
    outside,
    union,
    without_gaps,
)
from benchmarks.ranks.merge import Judge, merge
from benchmarks.ranks.plain import OVERLAPPED, PLAIN, collectives
from benchmarks.ranks.processes import RankFailed
from benchmarks.settings import Settings, Work
from megatron_dsa.errors import ImplementationError
from megatron_dsa.layers.parallel.gather import finish_with_proxy, start_gather

# Cases


def test_cases_of_a_full_run():
    _, plan = plan_of("ranks", [])
    found = [(c.kind, c.preset, c.ratio, c.tokens, c.grid.name) for c, _ in plan]
    assert found == [
        ("layers", "v3.2", None, 32768, "tp1cp2"),
        ("layers", "v3.2", None, 65536, "tp1cp2"),
        ("layers", "v4-flash", 4, 65536, "tp1cp2"),
        ("layers", "v4-flash", 128, 65536, "tp1cp2"),
        ("layers", "v3.2", None, 131072, "tp1cp2"),
        ("layers", "v3.2", None, 8192, "tp2cp1"),
        ("layers", "v3.2-h32", None, 8192, "tp2cp1"),
        ("layers", "v3.2", None, 32768, "tp2cp1"),
        ("layers", "v3.2-h32", None, 32768, "tp2cp1"),
        ("layers", "v4-flash", 4, 32768, "tp2cp1"),
        ("layers", "v4-flash", 128, 32768, "tp2cp1"),
        ("dense", "v3.2", None, 32768, "tp1cp2"),
        ("dense", "v3.2", None, 65536, "tp1cp2"),
    ]
    # One rank comes first: the others are compared with it.
    assert {works[0] for _, works in plan} == {Work("step", ONE_RANK)}
    ways = {
        case.grid.name + case.kind + str(case.ratio or ""): [w.way for w in works[1:]]
        for case, works in plan
    }
    alone = "one rank masked"
    assert ways["tp1cp2layers"] == ["zigzag", "contiguous", "plain", alone, "masked"]
    assert ways["tp1cp2layers4"] == ["zigzag", "contiguous", "plain"]
    dense = ["one rank dense", "dense"]
    assert ways["tp2cp1layers"] == ["heads", "rows", alone, "masked heads", "select", *dense]
    assert ways["tp2cp1layers4"] == ["heads", "rows"]


def test_a_rank_holds_its_part():
    case = Case("layers", "v3.2", 8192, cp=4, heads=128, layers=3, workspace_mib=7)
    alone, sharding = case.spec(ONE_RANK), case.spec("contiguous")
    assert (alone.cp, alone.cp_layout) == (1, "zigzag")
    assert (sharding.cp, sharding.cp_layout, sharding.layers) == (4, "contiguous", 3)
    assert case.spec("masked").selected_attention == "masked"
    assert sharding.selected_attention == alone.selected_attention == "auto"
    assert alone.workspace_mib == sharding.workspace_mib == 7
    two = Case("layers", "v3.2", 8192, tp=2)
    assert two.spec("rows").tp_mode == "sequence"
    select, alone = two.spec("select"), two.spec(ONE_RANK_MASKED)
    assert (select.tp, select.tp_mode, select.selected_attention) == (2, "select", "masked")
    assert (alone.tp, alone.tp_mode, alone.selected_attention) == (1, "auto", "masked")


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
        "timeline": {
            "NCCL": [[0.005, 0.02], [0.04, 0.05], [0.08, 0.1]],
            "other kernels": [[0.0, 0.01], [0.018, 0.022], [0.03, 0.07]],
        },
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
    with traffic_of.counted() as traffic:
        distributed.all_gather_into_tensor(large, small, "four")
        distributed.all_gather_into_tensor(large, input_tensor=small, group="four")
        distributed.all_gather_into_tensor(small, small, group="alone")
    assert traffic.calls == [("all_gather_into_tensor", 3 * 20)] * 2 and traffic.bytes == 120
    assert distributed.all_gather_into_tensor is collective
    assert called == ["four", "four", "alone"]
    assert traffic_of.reduce(20, 4) == 60  # of 80 bytes, 20 are a rank's own
    assert traffic_of.exchange(80, 4) == 60
    assert traffic_of.sum_everywhere(80, 4) == 120


def test_parts_of_different_sizes(monkeypatch):
    """Of an all-to-all with sizes of its own, a rank's part for itself does not leave it."""
    distributed, half = torch.distributed, torch.zeros(6, 5, dtype=torch.bfloat16)

    def collective(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
        pass

    monkeypatch.setattr(distributed, "all_to_all_single", collective)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 3)
    monkeypatch.setattr(distributed, "get_rank", lambda group: 1)
    with traffic_of.counted() as traffic:
        for splits in ([6, 0, 0], [4, 2, 0], [0, 6, 0]):
            distributed.all_to_all_single(half, half, [2, 2, 2], splits)
        distributed.all_to_all_single(half[:0], half[:0], [0, 0, 0], [0, 0, 0])
        distributed.all_to_all_single(half, half)
    assert [sent for _, sent in traffic.calls] == pytest.approx([60, 40, 0, 0, 40])


# Answers of all ranks


def answers(forward, step, out=1.0, **more):
    """Answers of as many ranks as there are lists."""
    return [
        {"status": "ok", "times": {"forward": f, "step": s}, "heads": 4, "ran": "x=y",
         "warm_up_s": 0.0, "squares": {"out": out / len(step), "dx": 4.0 / len(step)},
         **{name: value[rank] for name, value in more.items()}}
        for rank, (f, s) in enumerate(zip(forward, step, strict=True))
    ]  # fmt: skip


def test_the_slowest_rank_counts():
    both = answers([[1, 5, 3], [2, 4, 1]], [[10, 10, 10], [30, 20, 10]], peak_mib=[7, 9],
                   exposed_share=[0.2, 0.1])  # fmt: skip
    (_, forward), (part, step) = merge(both)
    assert part == "step" and (forward["ms"], forward["repeats"]) == (3, 3)
    assert forward["p10"] == pytest.approx(2.2) and forward["p90"] == pytest.approx(4.6)
    assert (step["ms"], step["peak_mib"], step["ran"]) == (20, 9, "x=y")
    assert step["exposed_share"] == 0.2 and step["bytes_per_token"] is None
    assert "peak_mib" not in forward


def test_speed_and_difference_of_dense_attention():
    both = [
        {"times": {"step": [10.0]}, "flop": {"step": 2e12}, "difference": difference}
        for difference in (0.1, 0.2)
    ]
    ((_, result),) = merge(both)
    assert result["tflops"] == pytest.approx(200) and result["out_error"] == 0.2


def judged(judge, way, found):
    return {part: judge.judged(way, part, result, found) for part, result in merge(found)}


CP2 = Case("layers", "v3.2-h32", 512, cp=2, heads=32)


def test_efficiency_refers_to_one_rank_of_the_same_run():
    judge = Judge(CP2)
    alone = judged(judge, ONE_RANK, answers([[6.0]], [[30.0]]))
    assert all("efficiency" not in result for result in alone.values())
    both = judged(judge, "zigzag", answers([[4.0], [2.0]], [[10.0], [20.0]]))
    assert {part: result["efficiency"] for part, result in both.items()} == {
        "forward": 0.75, "step": 0.75
    }  # fmt: skip
    assert both["step"]["out_error"] == 0
    # Another run has nothing to refer to.
    other = judged(Judge(CP2), "zigzag", answers([[4.0], [2.0]], [[10.0], [20.0]]))
    assert "efficiency" not in other["step"] and other["step"]["status"] == "ok"


def test_masked_ways_refer_to_masked_attention_of_one_rank():
    judge = Judge(CP2)
    judged(judge, ONE_RANK, answers([[6.0]], [[30.0]]))
    alone = judged(judge, ONE_RANK_MASKED, answers([[6.0]], [[16.0]]))
    assert "efficiency" not in alone["step"] and alone["step"]["out_error"] == 0
    both = {way: answers([[4.0]] * 2, [[10.0]] * 2) for way in ("masked", "zigzag")}
    found = {way: judged(judge, way, x)["step"]["efficiency"] for way, x in both.items()}
    assert found == {"masked": 0.8, "zigzag": 1.5}
    # It has to find what the other attention does.
    other = judged(judge, ONE_RANK_MASKED, answers([[6.0]], [[16.0]], out=1.1))
    assert other["step"]["status"] == "failed"


def test_dense_ways_refer_to_dense_attention_of_one_rank():
    """Dense attention has other results than attention to selected keys."""
    judge = Judge(CP2)
    judged(judge, ONE_RANK, answers([[6.0]], [[30.0]]))
    judged(judge, ONE_RANK_DENSE, answers([[6.0]], [[8.0]], out=3.0))
    found = judged(judge, "dense", answers([[4.0]] * 2, [[5.0]] * 2, out=3.0))["step"]
    assert found["efficiency"] == 0.8 and found["status"] == "ok" and found["out_error"] == 0
    other = judged(judge, "dense", answers([[4.0]] * 2, [[5.0]] * 2))
    assert other["step"]["status"] == "failed"


def test_short_gaps_are_left_out_of_a_timeline():
    assert without_gaps([(0, 4), (5, 6), (8, 9)], 1.0) == [[0, 6], [8, 9]]
    assert without_gaps([], 1.0) == []


def test_timelines_are_kept(tmp_path):
    file = tmp_path / "timelines.jsonl"
    found = answers([[4.0]] * 2, [[10.0]] * 2)
    script = {"zigzag": [x | {"timeline": {"NCCL": [[0.0, 1.0]]}} for x in found]}
    settings = Settings("cpu", timelines=str(file))
    one = ranks._Measurer(
        CP2, torch.device("cpu"), settings, lambda case, way, settings, timeout: script[way]
    )
    list(one.measure(Work("step", "zigzag")))
    line = json.loads(file.read_text())
    assert line["way"] == "zigzag" and line["case"]["cp"] == 2 and "torch" in line["versions"]
    assert line["ranks"] == [{"NCCL": [[0.0, 1.0]]}] * 2


def test_graphs_need_a_gpu():
    case = dataclasses.replace(CP2, graph=True)
    one = ranks.prepare(case, torch.device("cpu"), Settings("cpu"))
    with pytest.raises(ImplementationError, match="CUDA graphs need a GPU"):
        list(one.measure(Work("step", ONE_RANK)))


@pytest.mark.parametrize("out", [1.1, 0.0, math.nan])
def test_another_result_is_no_result(out):
    judge = Judge(CP2)
    judged(judge, ONE_RANK, answers([[6.0]], [[30.0]]))
    found = judged(judge, "zigzag", answers([[1.0]] * 2, [[1.0]] * 2, out=out))
    assert {result["status"] for result in found.values()} == {"failed"}
    assert all("norms differ" in result["reason"] for result in found.values())


def test_a_way_that_failed_is_recorded():
    script = {ONE_RANK: answers([[6.0]], [[30.0]]), "zigzag": answers([[4.0]] * 2, [[20.0]] * 2)}

    def measured(case, way, settings, timeout):
        assert settings == {"repeats": 5, "budget": 5.0} and timeout == 540.0
        if way not in script:
            raise RankFailed("signal 6")
        return script[way]

    measurer = ranks._Measurer(CP2, torch.device("cpu"), Settings("cpu"), measured)
    ways = (ONE_RANK, "contiguous", "zigzag")
    found = [dict(measurer.measure(Work("step", way)))["step"] for way in ways]
    assert [result["status"] for result in found] == ["ok", "failed", "ok"]
    assert found[1]["reason"] == "signal 6" and found[2]["efficiency"] == 0.75


def test_ranks_that_need_more_gpus_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    measurer = ranks._Measurer(CP2, torch.device("cuda"), Settings("cuda"))
    with pytest.raises(ImplementationError, match="tp1cp2 needs 2 GPUs, not 1"):
        list(measurer.measure(Work("step", "zigzag")))


def test_grids():
    assert Grid.parse("tp2cp4").ranks == 8 and Grid(2, 4).name == "tp2cp4"


# Plain collectives


class Launched:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait(self):
        self.log.append(f"{self.name} is there")


@pytest.fixture
def log(monkeypatch):
    """What two ranks that hold the same would launch and wait for, in order."""
    log = []

    def gather(out, x, group=None, async_op=False):
        log.append("gather")
        out.copy_(torch.cat([x, x]))
        return Launched("gather", log) if async_op else None

    def reduce(out, x, group=None, async_op=False):
        log.append("sum")
        out.copy_(2 * x.chunk(2)[0])
        return Launched("sum", log) if async_op else None

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", reduce)
    return log


class _Noted(torch.autograd.Function):
    """Other work, between launch and arrival in the forward and on the way back."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append("work")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("work back")
        return grad, None


def gathered_under_work(log):
    keys, q = torch.ones(3, 1, 2, requires_grad=True), torch.ones(6, 2, requires_grad=True)
    gathering = start_gather(keys, SimpleNamespace(size=lambda: 2))
    noted = _Noted.apply(q, log)
    everything, grad_proxy = finish_with_proxy(gathering)
    (everything * noted + grad_proxy).sum().backward()
    return keys.grad


def test_plain_collectives_are_waited_for_at_once(log):
    with collectives(OVERLAPPED):
        grad = gathered_under_work(log)
    assert log[:3] == ["gather", "work", "gather is there"]
    # Autograd goes back from the arrival.
    assert log[3:] == ["sum", "work back", "sum is there"]
    log.clear()
    with collectives(PLAIN):
        assert torch.equal(gathered_under_work(log), grad)
    ours = torch.distributed.all_gather_into_tensor
    assert log[:3] == ["gather", "gather is there", "work"]
    assert log.index("sum is there") == log.index("sum") + 1 < log.index("work back")
    log.clear()
    gathered_under_work(log)  # as before
    assert log[:3] == ["gather", "work", "gather is there"]
    with collectives(PLAIN):
        assert torch.distributed.all_gather_into_tensor is not ours
        out = torch.empty(4)
        assert torch.distributed.all_gather_into_tensor(out, torch.ones(2)) is None
