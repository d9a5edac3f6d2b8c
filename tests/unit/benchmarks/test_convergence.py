"""The comparison of sparse and dense training: what is compared, and what is read from the logs."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.train import convergence, text
from benchmarks.train.convergence import SMALL, TINY, WAYS, Run
from megatron_dsa.extras.report.events import RunLog


def commands(way, tmp_path, size=SMALL):
    run = Run(way, 3, tmp_path / way, tmp_path / "start", tmp_path / "data", size)
    return run.commands()


def pairs(flags):
    """Flags with their values, as a mapping."""
    starts = [i for i, flag in enumerate(flags) if flag.startswith("--")] + [len(flags)]
    return {flags[a]: flags[a + 1 : b] for a, b in itertools.pairwise(starts)}


@pytest.mark.parametrize("size", [SMALL, TINY], ids=["small", "tiny"])
def test_ways_differ_in_attention_alone(size, tmp_path):
    """Same size, text, order, schedule and number of steps."""
    common = pairs([*size.model.split(), *convergence.training_flags(size, tmp_path / "data", 3)])
    for way in WAYS:
        for flags in commands(way, tmp_path, size):
            got = pairs(flags)
            assert {name: got.get(name) for name in common} == common
            assert (got.get("--load") == [str(tmp_path / "start")]) == ("--finetune" in got)
    first, second = map(pairs, commands("staged", tmp_path, size))
    assert first["--exit-interval"] == [str(size.steps // 3)]
    assert first["--save"] == second["--load"]
    assert "--dsa-indexer-use-sparse-loss" not in first
    assert "--dsa-indexer-use-sparse-loss" in second and "--finetune" not in second


@pytest.mark.parametrize("steps", [160, 175, 300])
def test_every_evaluated_step_is_logged(steps, tmp_path):
    size = replace(SMALL, steps=steps, every=max(steps // 12, 1))
    flags = pairs(convergence.training_flags(size, tmp_path, 3))
    interval = int(flags["--log-interval"][0])
    assert interval <= max(size.every // 5, 1)
    assert not any(step % interval for step in (*range(size.every, steps, size.every), steps))
    if steps == SMALL.steps:
        assert interval == 5


def test_weights_to_start_from_are_made_once(tmp_path, monkeypatch):
    """For all but the hybrid model, which starts from its own."""
    made = []
    monkeypatch.setattr(convergence, "prepare_text", lambda folder, size: made.append("text"))
    monkeypatch.setattr(
        convergence, "make_start", lambda folder, *_: made.append("start") or folder.mkdir()
    )
    monkeypatch.setattr(Run, "train", lambda run: iter([("all", {"way": run.way})]))
    comparison = convergence.Comparison(TINY, 1, tmp_path)
    assert list(comparison.train("hybrid")) == [("all", {"way": "hybrid"})] and made == ["text"]
    for way in ("dense", "sparse"):
        list(comparison.train(way))
    assert made == ["text", "start"]


def test_held_out_texts_are_whole_and_the_same_every_time():
    texts = {f"file {i}": "x" * (i % 7 + 1) for i in range(100)}
    chosen = text.held_out(texts, 40)
    assert 40 <= sum(len(texts[name]) for name in chosen) < 47
    assert text.held_out(dict(reversed(texts.items())), 40) == chosen
    # Another version's files move few texts to the other side.
    assert len(text.held_out(texts | {"new": "xxx"}, 40) ^ chosen) <= 3


def test_training_time_leaves_compilation_out():
    times = [(1, 30.0), (5, 0.2), (10, 0.1), (15, 0.1), (20, 0.1)]
    log = RunLog("run", {"iteration-time": times}, {}, {})
    assert convergence.training_seconds(log) == pytest.approx(
        {1: 0.1, 5: 0.9, 10: 1.4, 15: 1.9, 20: 2.4}
    )


def test_results_of_a_log():
    scalars = {
        "iteration-time": [(1, 30.0), (10, 0.1), (20, 0.1)],
        "lm loss": [(10, 2.0), (20, 1.5)], "lm loss validation": [(10, 2.5), (20, 2.25)],
    }  # fmt: skip
    (step, first), _, (whole, last) = convergence.results(RunLog("run", scalars, {}, {}), 7)
    assert (step, first["lm_loss"], first["validation_loss"]) == ("10", 2.0, 2.5)
    assert first["training_s"] == pytest.approx(1.0) and first["indexer_loss"] is None
    assert whole == "all" and last == {"status": "ok", "ms": 100.0, "parameters": 7}
