"""The family ``engine``: ways share weights, other outputs fail, steps are timed in turn."""

import pytest
import torch

from benchmarks import engine
from benchmarks.__main__ import plan_of
from benchmarks.charts.drawing import Point
from benchmarks.engine import BF16, FIRST, LOCAL, STEP, Case, kernels, stacks
from benchmarks.settings import Settings, Work
from megatron_dsa.errors import ImplementationError
from tests.helpers import relative_error
from tests.host import start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are for the CPU")


def built(way=LOCAL, mlp="dense"):
    return stacks.build(way, "tiny", 64, mlp, 1, start())


def measurer(build=None, repeats=3, **settings):
    case = Case("tiny", 64, "dense", workspace_mib=1)
    made = Settings("cpu", repeats=repeats, **settings)
    return engine._Measurer(case, start(), made, build or local_for_all)


def local_for_all(way, *arguments):
    """transformer-engine cannot run here; the layers of the other kind play its part."""
    return stacks.build(LOCAL, *arguments)


def test_short_sequences_and_dense_layers_come_first():
    _, plan = plan_of("engine", [])
    assert [(case.tokens, case.mlp) for case, _ in plan] == [
        (8192, "dense"), (8192, "experts"), (32768, "dense"), (32768, "experts"),
    ]  # fmt: skip
    for _, works in plan:
        # All first steps come before: what fails or ends the process is no part of the rounds.
        assert works[: len(works) // 2] == [Work(FIRST, way) for way in stacks.WAYS]
        assert works[len(works) // 2 :] == [Work(STEP, way) for way in stacks.WAYS]


@pytest.mark.parametrize("mlp", ["dense", "experts"])
def test_a_stack_is_that_of_the_model(mlp):
    """Widths of V3.2 in the real case; every parameter gets a gradient in the tiny one."""
    stack = built(mlp=mlp)
    out = stack.step()
    assert out.shape == stack.x.shape and not out.requires_grad
    missing = [n for n, p in stack.block.named_parameters() if p.grad is None]
    assert not missing and len(stack.block.layers) == stacks.LAYERS
    before = stack.block.layers[0].self_attention.linear_proj.weight.grad.clone()
    stack.step()  # not added to the former one
    after = stack.block.layers[0].self_attention.linear_proj.weight.grad
    assert relative_error(after, before) < 1e-2
    stack.clear()
    assert stack.x.grad is None
    assert all(p.grad is None for p in stack.block.parameters())
    fields = stacks.mlp_fields("v3.2", mlp, BF16)
    assert fields["ffn_hidden_size"] == 18432 and fields.get("moe_ffn_hidden_size", 2048) == 2048
    assert fields.get("moe_grouped_gemm", mlp == "experts") == (mlp == "experts")


def test_grouped_experts_have_the_weights_of_single_ones():
    name = "layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
    assert stacks.common_name("layers.0.mlp.experts.linear_fc1.weight3") == name
    assert stacks.common_name(name) == name
    single, grouped = torch.nn.ModuleDict(), torch.nn.Module()
    single["experts"] = torch.nn.ModuleDict({"local_experts": torch.nn.ModuleList(
        torch.nn.ModuleDict({"linear_fc1": torch.nn.Linear(4, 6, bias=False)}) for _ in range(2)
    )})  # fmt: skip
    grouped.experts = torch.nn.Module()
    grouped.experts.linear_fc1 = torch.nn.Module()
    for expert in range(2):
        weight = torch.nn.Parameter(torch.empty(6, 4))
        setattr(grouped.experts.linear_fc1, f"weight{expert}", weight)
    for module in (single, grouped):
        stacks.fill_by_name(module)
    for one, other in zip(single.parameters(), grouped.parameters(), strict=True):
        assert one.equal(other) and 0.1 < float(one.std()) < 1


def test_ways_are_timed_in_turn(monkeypatch):
    """Every round has one call of each way, and the ratio is that of rounds, not of medians."""
    measure = measurer(repeats=4, budget=1e9)
    for way in (LOCAL, BF16, "te-blockwise"):
        ((part, result),) = measure.measure(Work(FIRST, way))
        assert (part, result["status"]) == (FIRST, "ok")
        assert result.get("out_error", 0) < 1e-6 and "sparse_attention_forward" in result["ran"]
    order = []
    ways = {id(stack): way for way, stack in measure._stacks.items()}
    times = {LOCAL: [9.0, 1.0, 9.0, 1.0], BF16: [3.0, 1.0, 3.0, 1.0],
             "te-blockwise": [6.0, 2.0, 6.0, 2.0]}  # fmt: skip

    def milliseconds(call, repeats):
        assert repeats == 1
        way = ways[id(call.__self__)]
        order.append(way)
        return [times[way][order.count(way) - 1]]

    monkeypatch.setattr(measure.clock, "milliseconds", milliseconds)
    found = {way: dict(measure.measure(Work(STEP, way)))[STEP] for way in times}
    assert order == [LOCAL, BF16, "te-blockwise"] * 4
    assert found["te-blockwise"]["time_over_te"] == 2
    assert found[LOCAL]["time_over_te"] == 2 and "time_over_te" not in found[BF16]
    assert found[BF16]["ms"] == 2 and found[BF16]["tokens_per_s"] == 32e3
    assert found[LOCAL]["repeats"] == 4 and found[LOCAL]["p90"] == 9
    # A way without a first step in this process is not timed.
    with pytest.raises(ImplementationError, match="first step failed"):
        list(measure.measure(Work(STEP, "te-tensorwise")))


def test_rounds_end_with_their_time(monkeypatch):
    measure = measurer(repeats=50, budget=0.0)
    list(measure.measure(Work(FIRST, LOCAL)))
    ((_, result),) = measure.measure(Work(STEP, LOCAL))
    assert result["repeats"] == engine.FEWEST


def test_another_output_is_a_failure():
    def build(way, *arguments):
        stack = stacks.build(LOCAL, *arguments)
        if way != LOCAL:
            with torch.no_grad():
                stack.block.layers[0].mlp.linear_fc2.weight.mul_(3 if way == BF16 else 1.02)
        return stack

    measure = measurer(build)
    list(measure.measure(Work(FIRST, LOCAL)))
    ((_, result),) = measure.measure(Work(FIRST, BF16))
    assert result["status"] == "failed" and "not the output of local" in result["reason"]
    ((_, result),) = measure.measure(Work(FIRST, "te-blockwise"))
    assert result["status"] == "ok" and 1e-3 < result["out_error"] < engine.FP8_ERROR_LIMIT
    with pytest.raises(ImplementationError, match="first step failed"):
        list(measure.measure(Work(STEP, BF16)))


def test_stacks_that_do_not_fit_are_built_one_at_a_time():
    """A lack of memory frees all others; a second one is a failure."""
    alive, built_ways = [], []

    def build(way, *arguments):
        built_ways.append(way)
        if len(measure._stacks) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        alive.append(len(measure._stacks))
        return stacks.build(LOCAL, *arguments)

    measure = measurer(build)
    for way in (LOCAL, BF16):
        ((_, result),) = measure.measure(Work(FIRST, way))
        assert result["status"] == "ok"
    assert measure.one_at_a_time and built_ways == [LOCAL, BF16, BF16]
    for way in (LOCAL, BF16):
        ((_, result),) = measure.measure(Work(STEP, way))
        assert result["repeats"] == 3
    assert set(alive) == {0} and list(measure._stacks) == [BF16]

    def never(*_):
        raise RuntimeError("cuDNN: out of memory")

    measure = measurer(never)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(measure.measure(Work(FIRST, LOCAL)))
    assert not measure._stacks


def test_transformer_engine_is_missing_here():
    with pytest.raises(ImplementationError, match="transformer-engine cannot be used: "):
        built(BF16)


def test_kernels_are_told_apart_by_name_outside_of_operations():
    def event(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}

    launches = [100, 105, 130, 140, 150, 160]
    names = ["nvjet_sm90_tst", "attention", "nvjet_sm90_qqtst", "block_scaled_1d_cast_transpose",
             "vectorized_layer_norm", "void transformer_engine::amax_kernel"]  # fmt: skip
    events = [event("user_annotation", "megatron_dsa.sparse_attention_forward.tilelang", 99, 10)]
    for number, (ts, name) in enumerate(zip(launches, names, strict=True)):
        events.append(event("cuda_driver", "cuLaunchKernelEx", ts, 1, correlation=number))
        events.append(event("kernel", name, 1000 + ts, 2.0**number, correlation=number))
    found = dict(kernels.kernel_groups(events))
    assert {part: row["ms"] * 1e3 for part, row in found.items()} == {
        "step/casts": 40, "step/other": 16, "step/matrix products": 4,
        "step/operations of this package": 3,
    }  # fmt: skip
    assert list(found) == sorted(found, key=lambda part: -found[part]["ms"])
    assert sum(row["share_of_time"] for row in found.values()) == pytest.approx(1)
    assert found["step/casts"]["ran"].startswith("void transformer_engine::amax_kernel + block_sc")


def test_bars_tell_the_ratio(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.charts.engine import bar_label, draw_engine

    case = {"preset": "v3.2", "tokens": 8192, "mlp": "dense"}
    points = [
        Point(case | changes, "step", way, "GPU", {"torch": "2"}, {"tokens_per_s": 1e4} | more)
        for changes in ({}, {"mlp": "experts"})
        for way, more in ((BF16, {}), ("te-blockwise", {"time_over_te": 0.9}))
    ]
    assert [bar_label(point) for point in points[:2]] == ["", "0.900"]
    (chart,) = draw_engine(points, tmp_path)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert draw_engine([Point(case, "first step", BF16, "GPU", {}, {})], tmp_path) == []
