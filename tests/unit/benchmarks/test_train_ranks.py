"""The same training on one and several ranks: cases, flags, what is compared."""

import dataclasses

import pytest
import torch

from benchmarks.__main__ import plan_of
from benchmarks.settings import Settings, Work
from benchmarks.train import Case, _Measurer, ranks
from benchmarks.train.ranks import MEASURED, ONE, QUICK, WAYS, SameOnRanks
from megatron_dsa.errors import ImplementationError
from megatron_dsa.extras.report.events import RunLog


def test_cases():
    _, plan = plan_of("train", ["--kinds", "ranks", "--runs", "3"])
    assert [(case.model, case.tokens, case.steps, case.run) for case, _ in plan] == [
        ("v3.2", 8192, 200, 3), ("v4", 4096, 200, 3),
    ]  # fmt: skip
    assert {works[0] for _, works in plan} == {Work("all", ONE)}
    assert [w.way for w in plan[1][1]][2:] == ["TP2", "CP2", "EP2", "TP2 x CP2 x EP2"]
    with pytest.raises(ValueError, match="--steps must be at least 10, got 9"):
        ranks.size_of("v4", True, 9)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Function that makes the runs of a model, and all command lines that they start."""
    commands = []
    monkeypatch.setattr(ranks, "prepare_text", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def train(flags, log):
        commands.append(flags)
        if "--save" in flags:
            (tmp_path / "start").mkdir()

    monkeypatch.setattr(ranks, "train", train)
    monkeypatch.setattr(ranks, "launch", lambda command, log, **_: commands.append(command))
    losses = {}

    def read_run(way, _):
        curve = [(step, losses[way]) for step in (1, 2)]
        return RunLog(way, {"lm loss": curve, "iteration-time": [(1, 9.0), (2, 0.5)]}, {}, {})

    monkeypatch.setattr(ranks, "read_run", read_run)
    make = lambda model: SameOnRanks(model, QUICK[model], 5, tmp_path)  # noqa: E731
    return make, commands, losses


@pytest.mark.parametrize("model", WAYS)
def test_ways_differ_in_ranks_alone(model, trained, tmp_path):
    make, commands, losses = trained
    same = make(model)
    of_two = [way for way, (number, _) in WAYS[model].items() if number <= 2]
    losses |= dict.fromkeys(of_two, 2.0) | {"CP2": 2.5}
    found = {way: dict(same.train(way)) for way in of_two}
    assert "out_error" not in found[ONE]["all"] and found["TP2"]["all"]["out_error"] == 0
    assert found["CP2"]["all"]["out_error"] == 0.25
    assert found["CP2"]["2"]["lm_loss"] == 2.5 and found["CP2"]["all"]["ms"] == 500
    with pytest.raises(ImplementationError, match="needs 4 GPUs, not 2"):
        list(same.train(list(WAYS[model])[-1]))
    start, *runs = commands  # one start for all
    assert str(tmp_path / "start") == start[start.index("--save") + 1]
    common = same.flags()
    for way, command in zip(of_two, runs, strict=True):
        number, more = WAYS[model][way]
        at = command.index(common[0])
        if number > 1:
            assert command[at - 4 : at] == ["--nproc-per-node", "2", "-m", "megatron_dsa.pretrain"]
        rest = command[at:]
        assert rest[: len(common)] == common
        own = [*more.split(), "--load", str(tmp_path / "start"), "--finetune"]
        assert rest[len(common) : len(common) + len(own)] == own


def test_the_measurer_takes_the_model(monkeypatch):
    monkeypatch.setattr(ranks, "prepare_text", lambda *_: None)
    monkeypatch.setattr(SameOnRanks, "train", lambda self, way: iter([(way, self.model)]))
    case = dataclasses.replace(Case("ranks", "v4", 128, 10), run=2)
    measurer = _Measurer(case, Settings("cpu", quick=True))
    assert list(measurer.measure(Work("all", "CP2"))) == [("CP2", "v4")]
    assert measurer._comparison.size.steps == 10 and measurer._comparison.seed == 2
    assert MEASURED["v4"].length == 2048
