"""The same training with two attentions to selected keys: flags, what is read, what is drawn."""

import pytest

from benchmarks.__main__ import plan_of
from benchmarks.train import selected, whole
from benchmarks.train.selected import MEASURED, QUICK, WAYS, SameTraining, size_of
from megatron_dsa.extras.report.events import RunLog


@pytest.mark.parametrize("size", [MEASURED, QUICK], ids=["measured", "quick"])
def test_ways_differ_in_attention_alone(size, tmp_path, monkeypatch):
    monkeypatch.setattr(selected, "prepare_text", lambda *_: None)
    same = SameTraining(size, 3, tmp_path)
    flags = {way: same.flags(way) for way in WAYS}
    assert {way: found[-2:] for way, found in flags.items()} == {
        "sparse": ["--dsa-selected-attention", "sparse"],
        "masked": ["--dsa-selected-attention", "masked"],
        "sparse again": ["--dsa-selected-attention", "sparse"],
    }
    own = {way: str(tmp_path / way / "events") for way in WAYS}
    common = [
        [flag for flag in found[:-2] if flag != own[way]] for way, found in flags.items()
    ]  # fmt: skip
    assert common[0] == common[1] == common[2]
    # Every step is logged; nothing is loaded, so the seed makes the weights.
    assert common[0][-2:] == ["--log-interval", "1"] and "--load" not in common[0]
    assert common[0][common[0].index("--seed") + 1] == "3"


def test_sizes():
    assert (MEASURED.length, MEASURED.steps) == (2048, 100)
    assert size_of(False, 40).every == 40 and size_of(True, None) == QUICK
    with pytest.raises(ValueError, match="--steps must be at least 10, got 9"):
        size_of(True, 9)
    _, ((case, works),) = plan_of("train", ["--kinds", "selected", "--runs", "2"])
    assert (case.tokens, case.steps, case.run) == (4 * 2048, 100, 2)
    assert [work.way for work in works] == list(WAYS)


def test_results_of_a_log():
    scalars = {
        "lm loss": [(1, 2.0), (2, 1.5)], "grad-norm": [(1, 1.0), (2, 0.5)],
        "dsa/indexer-loss": [(2, 0.25)], "iteration-time": [(1, 30.0), (2, 0.1), (3, 0.3)],
        "dsa/calls/key_bits/triton": [(2, 8.0)],
        "dsa/calls/masked_attention_forward/tilelang": [(2, 8.0)],
    }  # fmt: skip
    (first, one), (second, two), whole = selected.results(RunLog("run", scalars, {}, {}))
    assert (first, one["lm_loss"], one["indexer_loss"]) == ("1", 2.0, None)
    assert (second, two["grad_norm"], two["indexer_loss"]) == ("2", 0.5, 0.25)
    ran = "key_bits=triton; masked_attention_forward=tilelang"
    part, found = whole
    assert part == "all" and found["ran"] == ran and found["repeats"] == 2
    assert found["ms"] == pytest.approx(200.0) and found["status"] == "ok"


def test_charts_name_the_ways_of_the_trainings():
    pytest.importorskip("matplotlib")
    from benchmarks.charts.same import COMPARISONS

    assert {x.kind: list(x.labels) for x in COMPARISONS} == {
        "selected": list(WAYS), "whole-v4": list(whole.WAYS),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ways", "file"),
    [
        ("selected", ("sparse", "masked", "sparse again"), "train_selected.png"),
        ("whole-v4", ("fused", "unfused", "fused again"), "train_whole_v4.png"),
    ],
)
def test_the_chart(kind, ways, file, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks.charts import same as chart
    from benchmarks.charts.drawing import Point

    def point(way, step, **values):
        case = {"kind": kind, "run": 1}
        return Point(case, step, way, "GPU 9000", {"torch": "2.11"}, values)

    losses = dict(zip(ways, ((3.0, 2.0), (3.0, 2.25), (3.0, 1.5)), strict=True))
    points = [
        point(way, str(step), lm_loss=loss, indexer_loss=2 * loss)
        for way, curve in losses.items()
        for step, loss in zip((2, 10), curve, strict=True)
    ]
    points += [point(ways[0], "all", ms=5.0)]
    assert chart.apart(points, ways[1], ways[0], "lm_loss") == {1: {2: 0.0, 10: 0.25}}
    drawn = []
    monkeypatch.setattr(
        chart, "save", lambda figure, _title, target: drawn.append(figure) or target
    )  # fmt: skip
    assert chart.draw_same(points, tmp_path) == [tmp_path / file]
    (loss, indexer, apart, indexer_apart) = drawn[0].axes
    assert [list(line.get_ydata()) for line in loss.lines] == [list(x) for x in losses.values()]
    assert [list(line.get_ydata()) for line in apart.lines[:2]] == [[0, 0.25], [0, -0.5]]
    assert [list(line.get_ydata()) for line in indexer_apart.lines[:2]] == [[0, 0.5], [0, -1]]
    assert len(indexer.lines) == 3
    assert chart.draw_same([point(ways[0], "all", ms=5.0)], tmp_path) == []
