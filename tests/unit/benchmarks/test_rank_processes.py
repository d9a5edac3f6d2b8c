"""The processes of several ranks: one that fails ends the measurement in bounded time."""

import importlib
import multiprocessing
import sys

import pytest
import torch

from benchmarks.ranks import processes
from benchmarks.ranks.cases import LAYERS, ONE_RANK, Case
from benchmarks.ranks.processes import Grids, RankFailed, failure
from tests.processes import prepare

CASE = Case(LAYERS, "tiny", 256, cp=2)

#: A rank that does what ``way`` says: of a module of its own, which spawned processes import.
ACTORS = """
import os, time
import torch
def act(case, way, device, settings):
    rank = torch.distributed.get_rank()
    if way == "lack on one":
        if rank == 1:
            raise torch.OutOfMemoryError(f"rank {rank}")
        time.sleep(600)
    elif way == "die" and rank == 1:
        os.abort()
    elif way == "hang" and rank == 0:
        time.sleep(600)
    return {"rank": rank, "device": str(device), **settings, "process": os.getpid()}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "rank_actors.py").write_text(ACTORS)
    monkeypatch.syspath_prepend(tmp_path)
    act = importlib.import_module("rank_actors").act
    monkeypatch.setattr(processes, "GRACE", 0.5)
    prepare()  # a process has one fork server: that of all tests
    before = set(multiprocessing.active_children())  # of tests that ran in this process
    grids = Grids(act)
    yield lambda way, timeout=60.0: grids.measured(CASE, way, {"repeats": 3}, timeout)
    grids.end()
    sys.modules.pop("rank_actors")
    assert set(multiprocessing.active_children()) <= before


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are on the CPU")


def test_every_rank_answers(run):
    common = {"status": "ok", "device": "cpu", "repeats": 3}
    two, one = run("measure"), run(ONE_RANK)
    processes = [answer.pop("process") for answer in two + one]
    assert two == [common | {"rank": 0}, common | {"rank": 1}]
    assert one == [common | {"rank": 0}]
    assert len(set(processes)) == 3


def test_ranks_stay_for_the_next_way(run):
    first, one, second = run("measure"), run(ONE_RANK), run("another")
    assert [x["process"] for x in first] == [x["process"] for x in second]
    assert run(ONE_RANK) == one


@pytest.mark.parametrize(
    ("way", "reason"),
    [("lack on one", "OutOfMemoryError: rank 1"), ("die", "process of rank 1 ended by signal 6")],
)
def test_a_rank_that_fails_ends_all(run, way, reason):
    before = run("measure")
    with pytest.raises(RankFailed, match=reason):
        run(way)
    after = run("measure")
    assert not {x["process"] for x in before} & {x["process"] for x in after}


def test_a_rank_that_hangs_is_named(run):
    with pytest.raises(RankFailed, match=r"no answer of rank 0.* in 12 s \(--timeout\)"):
        run("hang", timeout=12.0)


def test_what_libraries_say_about_memory():
    assert failure(torch.OutOfMemoryError("x"))["status"] == "out of memory"
    nccl = failure(RuntimeError("NCCL error: CUDA failure 2 'out of memory'\nmore"))
    assert nccl["status"] == "out of memory" and "more" not in nccl["reason"]
    assert failure(ValueError("shape")) == {"status": "failed", "reason": "ValueError: shape"}
