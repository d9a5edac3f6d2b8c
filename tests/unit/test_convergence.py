"""The comparison of sparse and dense training: what is compared, and how it is summed up."""

import itertools
from dataclasses import replace

import pytest

from benchmarks import convergence
from benchmarks.convergence import SMALL, TINY, WAYS, Run

pytest.importorskip("matplotlib")

from benchmarks import convergence_table as table
from megatron_dsa.tools.report.events import RunLog


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


def test_what_runs_start_from_is_removed(tmp_path, monkeypatch):
    """Where there is any: a hybrid model starts from its own weights."""

    def write(folder, *_):
        (folder / "files").mkdir(parents=True)
        return {}

    monkeypatch.setattr(convergence, "prepare_text", write)
    monkeypatch.setattr(convergence, "make_start", write)
    monkeypatch.setattr(Run, "train", lambda run, _: write(run.folder) | {"wall_seconds": 1})
    for ways in (["hybrid"], ["dense", "hybrid"]):
        output = tmp_path / str(len(ways))
        convergence.train_all(output, TINY, ways, [1], 1)
        left = {path.name for path in output.iterdir()}
        assert left == {"environment.json"} | {f"{way}-seed1" for way in ways}


def test_held_out_texts_are_whole_and_the_same_every_time():
    texts = {f"file {i}": "x" * (i % 7 + 1) for i in range(100)}
    chosen = convergence.held_out(texts, 40)
    assert 40 <= sum(len(texts[name]) for name in chosen) < 47
    assert convergence.held_out(dict(reversed(texts.items())), 40) == chosen
    # Another version's files move few texts to the other side.
    assert len(convergence.held_out(texts | {"new": "xxx"}, 40) ^ chosen) <= 3


def rows(losses):
    """Rows of runs whose bits per byte at step 10 and 20 are given by way and seed."""
    return [
        {
            "way": way, "seed": seed, "step": step, "validation_bits_per_byte": loss,
            "ms_per_step": 50.0, "training_seconds": step / 10, "at_once": 1,
            "parameters": 2_000_000, "gpu": "none", "torch": "2", "package": "0",
        }
        for (way, seed), curve in losses.items()
        for step, loss in zip((10, 20), curve, strict=True)
    ]  # fmt: skip


def test_the_gap_is_taken_seed_by_seed(tmp_path):
    some = rows(
        {
            ("dense", 1): (3.0, 2.0), ("dense", 2): (3.5, 2.5),
            ("sparse", 1): (3.1, 2.1), ("sparse", 2): (3.7, 2.8), ("sparse", 3): (9.0, 9.0),
        }
    )  # fmt: skip
    assert table.gaps(some, "sparse") == {
        10: pytest.approx([0.1, 0.2]),
        20: pytest.approx([0.1, 0.3]),
    }
    assert table.noise(some) == ({10: -0.25, 20: -0.25}, {10: 0.25, 20: 0.25})
    lines = table.summary(some).splitlines()
    assert len(lines) == 4
    assert "2.2500 ± 0.3536" in lines[2] and lines[2].endswith("|  |")
    assert "+0.2000 ± 0.1414" in lines[3]
    table.draw(some, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_training_time_leaves_compilation_out():
    times = [(1, 30.0), (5, 0.2), (10, 0.1), (15, 0.1), (20, 0.1)]
    log = RunLog("run", {"iteration-time": times}, {}, {})
    assert table.training_seconds(log) == pytest.approx({1: 0.1, 5: 0.9, 10: 1.4, 15: 1.9, 20: 2.4})
