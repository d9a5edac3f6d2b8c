"""The same training by several optimizers: flags, what is read, what is drawn."""

import pytest

from benchmarks.__main__ import plan_of
from benchmarks.train import muon
from benchmarks.train.muon import MEASURED, MODULES, MUON, QUICK, WAYS, SameStart, size_of
from megatron_dsa.extras.report.events import RunLog


@pytest.mark.parametrize("size", [MEASURED, QUICK], ids=["measured", "quick"])
def test_ways_differ_in_the_optimizer_alone(size, tmp_path, monkeypatch):
    monkeypatch.setattr(muon, "prepare_text", lambda *_: None)
    same = SameStart(size, 3, tmp_path)
    common = []
    for way, own in WAYS.items():
        flags = same.flags(way)
        assert flags[len(flags) - len(own) :] == own
        kept = flags[: len(flags) - len(own)]
        common.append([flag for flag in kept if flag != str(tmp_path / way / "events")])
    assert all(flags == common[0] for flags in common) and "--load" not in common[0]
    assert common[0][-2:] == ["--log-interval", "1"] and "--hc-mult" in common[0]
    assert WAYS["released"] == WAYS["groups"] == MUON and set(MODULES) == {"released"}


def test_sizes():
    assert (MEASURED.length, MEASURED.steps) == (256, 200)
    assert size_of(False, 40).every == 40 and size_of(True, None) == QUICK
    with pytest.raises(ValueError, match="--steps must be at least 10, got 9"):
        size_of(True, 9)
    _, ((case, works),) = plan_of("train", ["--kinds", "muon", "--runs", "2"])
    assert (case.tokens, case.steps, case.run) == (4 * 256, 200, 2)
    assert [work.way for work in works] == list(WAYS)


def test_results_of_a_log():
    scalars = {
        "lm loss": [(1, 2.0), (2, 1.5)], "dsa/indexer-loss": [(1, 1.0), (2, 0.5)],
        "lm loss validation": [(2, 1.75)], "iteration-time": [(1, 30.0), (2, 0.1), (3, 0.3)],
    }  # fmt: skip
    (first, one), (second, two), whole = muon.results(RunLog("run", scalars, {}, {}))
    assert (first, one["lm_loss"], one["validation_loss"]) == ("1", 2.0, None)
    assert (second, two["indexer_loss"], two["validation_loss"]) == ("2", 0.5, 1.75)
    assert whole[0] == "all" and whole[1]["ms"] == pytest.approx(200.0)


def test_the_chart(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks.charts import muon as chart
    from benchmarks.charts.drawing import Point

    def point(way, step, **values):
        return Point({"kind": "muon", "run": 1}, step, way, "CPU", {"torch": "2.11"}, values)

    losses = {
        "adamw": (3.0, 2.0),
        "released": (3.0, 2.5),
        "groups": (3.0, 2.0),
        "heads": (2.0, 1.0),
    }
    points = [
        point(way, str(step), lm_loss=loss)
        for way, curve in losses.items()
        for step, loss in zip((1, 2), curve, strict=True)
    ]
    points += [point(way, "2", validation_loss=1.0) for way in losses] + [point("adamw", "all")]
    assert chart.smooth({n: float(n) for n in range(1, 13)})[12] == 7.5
    assert chart.gaps(points, "groups") == {1: {1: 0.0, 2: -0.25}}
    drawn = []
    monkeypatch.setattr(
        chart, "save", lambda figure, _title, target: drawn.append(figure) or target
    )  # fmt: skip
    assert chart.draw_muon(points, tmp_path) == [tmp_path / "train_muon.png"]
    training, apart, validation = drawn[0].axes
    assert [len(axis.lines) for axis in (training, apart, validation)] == [4, 3, 4]
    assert chart.draw_muon([point("adamw", "all", ms=5.0)], tmp_path) == []
