"""Reports of resumed or staged runs: time, speed, marks."""

import itertools

import numpy as np
import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from torch.utils.tensorboard import SummaryWriter

from megatron_dsa.extras.report import facts
from megatron_dsa.extras.report.events import RunLog, read_run
from megatron_dsa.extras.report.panels import PANELS, thinned

LAYERS = (2, 3, 10)
PANEL = {panel.title: panel for panel in PANELS}


def write_stage(folder, stage, loaded, times, operations=()):
    """Write one process's times of a staged run."""
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("dsa_stage", stage, global_step=loaded)
        for step, seconds in enumerate(times, loaded + 1):
            writer.add_scalar("iteration-time", seconds, step)
            for name, share in dict(operations).items():
                writer.add_scalar(f"dsa/time/{name}", share * seconds, step)


@pytest.mark.parametrize("before", [0.1, 10.0], ids=["faster", "slower"])
def test_shares_are_of_the_steps_of_the_last_stage(tmp_path, before):
    operations = {"indexer_topk": 0.25, "sparse_attention_forward": 0.5}
    write_stage(tmp_path, "dense", 0, [before] * 100)
    write_stage(tmp_path, "sparse", 100, [9.0] + [1.0] * 10 + [5.0], operations)
    found = facts.step_shares(read_run("run", tmp_path))
    assert found == pytest.approx(
        {"indexer_topk": 0.25, "sparse_attention_forward": 0.5, "everything else": 0.25}
    )


def test_operations_that_take_turns_do_not_exceed_the_step():
    """Medians would: 0.5 + 0.5 + 0.5 of the step."""
    turns = {"indexer_topk": (1, 1, 0), "indexer_scores": (0, 1, 1), "dense_attention": (1, 0, 1)}
    scalars = {"iteration-time": [(step, 1.0) for step in range(1, 25)]}
    for name, turn in turns.items():
        scalars[f"dsa/time/{name}"] = [(step, 0.5 * turn[step % 3]) for step in range(1, 25)]
    shares = facts.step_shares(RunLog("run", scalars, {}, {}))
    assert list(shares.values()) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_operations_longer_than_the_step_leave_a_negative_rest():
    scalars = {"iteration-time": [(1, 1.0)], "dsa/time/indexer_topk": [(1, 1.25)]}
    shares = facts.step_shares(RunLog("long", scalars, {}, {}))
    assert shares[facts.REST] == pytest.approx(-0.25)


def test_only_compilation_is_left_out_of_speed(tmp_path):
    """Stalls are drawn; a start is logged alone, and included in the next interval."""
    with SummaryWriter(str(tmp_path)) as writer:
        for start, end in ((0, 60), (40, 100)):  # resumed from an earlier step
            writer.add_text("seq_length", "100", global_step=start)
            for step in range(start + 10, end + 1, 10):
                value = {start + 10: 2.0, 70: 3.0}.get(step, 300.0)
                writer.add_scalar("iteration-time", 1 / value, step)
                writer.add_scalar("batch-size", 1, step)
    run = read_run("run", tmp_path)
    assert run.starts == ((1, ""), (41, ""))
    figure, axis = pyplot.subplots()
    assert PANEL["Speed"].show(axis, [run])
    values = [(20, 300), (30, 300), (40, 300), (60, 300), (70, 3), (80, 300), (90, 300), (100, 300)]
    points = axis.lines[0].get_xydata().tolist()
    assert [(step, round(value / 100)) for step, value in points] == values
    pyplot.close(figure)


def test_of_unknown_starts_only_the_first_point_is_left_out():
    series = [(10, 1.0), (20, 9.0), (30, 1.0), (40, 9.0)]
    log = RunLog("run", {"iteration-time": series}, {}, {})
    assert facts.compiled(log, series) == series[1:]
    assert facts.compiled(log, series[:1]) == series[:1]
    assert facts.compiled(log, []) == []


def test_starts_that_were_written_over_do_not_count(tmp_path):
    """Failed twice at once, then resumed; the last one has no step yet."""
    for loaded, stage in ((0, "dense"), (20, "warmup"), (20, "sparse"), (10, "warmup"), (30, "x")):
        write_stage(tmp_path, stage, loaded, [1.0] * (30 - loaded))
    run = read_run("run", tmp_path)
    assert run.starts == ((1, "dense"), (11, "warmup"))
    assert run.stages() == [(1, "dense"), (11, "warmup")]


def test_stages_are_marked_and_end_the_lines_of_layers(tmp_path):
    for loaded, stage in ((0, "dense"), (20, "warmup"), (30, "warmup"), (40, "sparse")):
        write_stage(tmp_path, stage, loaded, [1.0] * 10)
    with SummaryWriter(str(tmp_path)) as writer:
        for step, layer in itertools.product(range(21, 51), LAYERS):
            writer.add_scalar("lm loss", 1.0, step)
            writer.add_scalar("dsa/indexer-loss", 1.0, step)
            writer.add_scalar(f"dsa/indexer-loss/layer-{layer}", float(layer), step)
    run = read_run("run", tmp_path)
    stages = "(dense from step 1, warmup from step 21, sparse from step 41)"
    assert facts.attention(run) == f"DSA, stage sparse {stages}"
    for runs, lines in (([run], len(LAYERS)), ([run, run], 2)):
        figure, axis = pyplot.subplots()
        assert PANEL["Indexer loss"].show(axis, runs)
        curves, marks = axis.lines[:lines], axis.lines[lines:]
        for curve in curves:
            steps, values = curve.get_data()
            assert steps[np.isnan(values)].tolist() == [40.5]
            assert set(range(21, 51)) < set(steps)
        assert [mark.get_xdata()[0] for mark in marks] == [21, 41] * len(runs)
        said = [text.get_text() for text in axis.texts]
        assert said == (["warmup", "sparse"] if len(runs) == 1 else [])
        pyplot.close(figure)


def test_no_mean_reaches_across_a_break():
    series = [(step, 1.0 if step < 50 else 3.0) for step in range(1, 101)]
    means = thinned(series, 10, breaks=[50])
    assert {value for _, value in means if value == value} == {1.0, 3.0}
    assert len(means) <= 12
