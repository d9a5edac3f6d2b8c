"""Family ``train``: plans against measurements, operations by group, resumed runs."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import train
from benchmarks.process_groups import one_rank
from benchmarks.rows import read_csv
from benchmarks.settings import Settings, Work
from benchmarks.train import operations, resume
from benchmarks.train.models import CASES, command, model_of, trainer
from megatron_dsa.config.gpus import GPUS
from megatron_dsa.extras.planner.command import parsed, plan_of
from megatron_dsa.layers import from_megatron as microbatch
from megatron_dsa.ops.layout import layout
from tests import host

BENCHMARKS = Path(train.__file__).parents[1]
KNOWN = 2 * operations.KNOWN**3


@pytest.fixture(autouse=True)
def no_process_groups():
    """Plans and steps need their own process groups and tables of layouts."""
    host.start()  # also starts Megatron without a GPU
    host.stop()
    layout.bshd_layout.cache_clear()
    microbatch._unpacked.cache_clear()


def recorded(kind, metric):
    return [row for row in read_csv(BENCHMARKS / "train.csv")
            if (row["case"]["kind"], row["metric"]) == (kind, metric)]  # fmt: skip


#: Records are of training on all query tokens, the former default.
ALL_QUERIES = ("--dsa-indexer-loss-queries", "1")


def planned_mib(argv):
    return plan_of(argv, 1, GPUS["h200"]).stages[0].memory.peak / 2**20


def command_of(number, tiny):
    return [*command(*CASES[number][1:], tiny), "--global-batch-size", "1"]


#: Models that take less memory than measured: index queries' gradients are scaled in place, queries
#: rotated in one pass, sparse attention runs in blocks, dense stages keep no copy of keys and
#: values. To be measured again.
LESS_NOW = {
    "sparse", "sparse, distributed optimizer", "sparse, experts",
    "sparse, prediction of a second token",
    "sparse, core and up projection recomputed", "sparse, all recomputed", "dense",
    "warmup, all trained", "hybrid, core and up projection recomputed", "v3.2", "v4",
}  # fmt: skip


def compare(planned, measured, name, rel):
    """Compare a plan with its measurement; layers that take less now are expected to fail."""
    assert planned <= (1 + rel) * measured
    if name in LESS_NOW and planned != pytest.approx(measured, rel=rel):
        pytest.xfail(f"{planned:.0f} MiB planned, {measured:.0f} measured before: measure again")
    assert planned == pytest.approx(measured, rel=rel)


@pytest.mark.parametrize("model", CASES, ids=lambda case: f"{case[0]}, {case[1]}k")
def test_planned_memory_is_what_was_measured(model):
    """Within a percent (10 are promised). In deterministic mode experts take more."""
    name, thousands, *_ = model
    rows = [
        row for row in recorded("memory", "peak_mib")
        if (row["case"]["model"], row["case"]["tokens"]) == (name, 1024 * thousands)
    ]  # fmt: skip
    planned = planned_mib([*command(*model_of(name, 1024 * thousands), tiny=False), *ALL_QUERIES])
    assert rows and all(row["gpu"] == "NVIDIA H200" for row in rows)
    for row in rows:
        compare(planned, row["value"], name, 0.01)


@pytest.mark.parametrize("model", resume.MODELS)
def test_planned_memory_of_a_whole_run(model):
    script = re.search(r"flags=\((.*?)\n\)", resume.SCRIPT.read_text(), re.DOTALL)[1]
    flags = shlex.split(script.replace("--data-path", "").replace('"$data"', ""))
    planned = planned_mib(["pretrain", *flags, *resume.MODELS[model].split()])
    (peak,) = (row["value"] for row in recorded("run", "peak_mib")
               if (row["case"]["model"], row["way"]) == (model, "fast"))  # fmt: skip
    compare(planned, peak, model, 0.005)


def test_planned_operations_are_those_of_the_record():
    plans = {}
    for row in recorded("operations", "planned_gflop"):
        model = row["case"]["model"], row["case"]["tokens"]
        if model not in plans:
            argv = [*command(*model_of(*model), tiny=False), "--global-batch-size", "1"]
            argv += ALL_QUERIES
            plans[model] = operations.planned(argv)
        plan = plans[model]
        expected = plan.total() if row["part"] == "all" else plan[row["part"]]
        assert row["value"] == pytest.approx(expected / 1e9, abs=1e-3)
    assert len(plans) >= 4


@pytest.mark.parametrize("number", train.COUNTED)
def test_a_case_of_tiny_dims_trains(number):
    with one_rank(), parsed(command_of(number, True), 1, planning=False) as args:
        assert args.global_batch_size == 1
        trainer(args)()


LOG = f"""==PROF== Connected to process 1
"ID","Kernel Name","Block Size","{operations.METRIC}"
"","","","inst"
"0","nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT","(384, 1, 1)","{{known:,}}"
"1","sparse_mla_query_gradient_kernel","(1, 1, 1)","3,000"
"2","query_gradient","(1, 1, 1)","500"
"3","void cutlass::device_kernel<flash::X, Y<(int)1>>(T1::Params)","(1, 1, 1)","70"
"4","nvjet_sm90_tst_64x8","(1, 1, 1)","9"
==PROF== Disconnected
"""


@pytest.mark.parametrize("unit", [1, 2])
def test_what_ncu_says_is_grouped(unit):
    kernels = operations.counted(LOG.format(known=KNOWN // unit).splitlines())
    assert [count for _, count in kernels[1:]] == [3000, 500, 70, 9]
    assert operations.by_group(kernels) == {
        "attention": 3070 * unit, "indexer loss": 500 * unit, operations.WEIGHTS: 9 * unit
    }  # fmt: skip


def test_counts_of_an_unknown_unit_are_refused():
    with pytest.raises(ValueError, match="for a product of 2 x 3584"):
        operations.by_group(operations.counted(LOG.format(known=KNOWN // 3).splitlines()))
    with pytest.raises(ValueError, match="ncu counted no"):
        operations.counted(["==ERROR== no permission"])


def test_results_of_operations():
    plan = operations.planned(command_of(0, tiny=True))
    results = dict(operations.results(plan, plan + plan))
    assert set(results) == {*plan, "all"} and len(plan) == 4
    for result in results.values():
        assert result["executed_gflop"] == 2 * result["planned_gflop"]


def test_names_of_our_kernels_are_known():
    found = set()
    for file in (BENCHMARKS.parent / "megatron_dsa/ops").rglob("*.py"):
        found |= set(re.findall(r"prim_func\n\s+def (\w+)\(", file.read_text()))
    products = found - {"key_unions", "best_columns"}  # for comparison only
    assert len(products) >= 8
    assert not [name for name in products if operations.group_of(name) == operations.WEIGHTS]


def logged(loss, steps):
    return {str(step): dict.fromkeys(resume.LOGGED, 1.0) | {"lm_loss": loss(step)}
            for step in steps}  # fmt: skip


def test_differences_of_a_resumed_run():
    straight = logged(float, range(1, 5))
    assert resume.differences(straight, logged(float, range(1, 5))) == []
    other = logged(lambda step: 3.1 if step == 3 else float(step), range(1, 5))
    assert resume.differences(straight, other) == ["step 3: lm_loss 3.0, resumed 3.1"]
    with pytest.raises(ValueError, match=r"steps .*'4'.* and, resumed, .*'1', '2'"):
        resume.differences(straight, logged(float, (1, 2)))


def test_a_resumed_run_that_differs_has_failed(monkeypatch):
    def run(trial, way):
        loss = 2.0 if way == "resumed" else 1.0
        yield from ((part, {"status": "ok", **result}) for part, result in
                    logged(lambda step: loss, (1, 2)).items())  # fmt: skip
        yield "all", {"status": "ok", "peak_mib": 1.0}

    monkeypatch.setattr(resume.Trial, "run", run)
    measurer = train._Measurer(train.Case("run", "v4", 64, 2), Settings("cpu", quick=True))
    assert len(list(measurer.measure(Work("all", "straight")))) == 3
    *_, (part, result) = measurer.measure(Work("all", "resumed"))
    assert part == "all" and result["status"] == "failed"
    assert result["reason"] == "step 1: lm_loss 1.0, resumed 2.0; step 2: lm_loss 1.0, resumed 2.0"
