"""The processes of several ranks: one that fails ends the measurement in bounded time."""

import importlib
import sys

import pytest
import torch

from benchmarks.ranks import pool as ranks_pool
from benchmarks.ranks.cases import ONE, Grid
from benchmarks.ranks.pool import Ended, Pool

CP2 = Grid(1, 2)

#: Ranks that do what they are told to: of a module of its own, which imports nothing.
ACTORS = """
import os, time
def act(rank, grid, store, settings, pipe):
    pipe.send({"status": "ok", "rank": rank})
    while True:
        try:
            _, what = pipe.recv()
        except EOFError:
            return
        if what == "lack" or what == "lack on one" and rank == 1:
            pipe.send({"status": "out of memory", "reason": f"rank {rank}"})
        elif what == "lack on one" or what == "hang" and rank == 0:
            time.sleep(600)
        elif what == "die" and rank == 1:
            os.abort()
        else:
            pipe.send({"status": "ok", "rank": rank})
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "rank_actors.py").write_text(ACTORS)
    monkeypatch.syspath_prepend(tmp_path)
    act = importlib.import_module("rank_actors").act
    monkeypatch.setattr(ranks_pool, "GRACE", 0.5)
    started = []

    def start(grid, timeout=60.0):
        started.append(Pool(grid, {}, timeout, act))
        assert [a["rank"] for a in started[-1].answers()] == list(range(grid.ranks))
        return started[-1]

    yield start
    for one in started:
        one.stop()
    sys.modules.pop("rank_actors")


def test_a_rank_that_waits_for_one_without_memory_is_ended(pool):
    grid = pool(CP2)
    grid.ask(None, "measure")
    assert [answer["rank"] for answer in grid.answers()] == [0, 1]
    grid.ask(None, "lack on one")
    with pytest.raises(Ended, match="rank 1") as found:
        grid.answers()
    assert found.value.reason == "rank 1" and found.value.gone
    assert not any(process.is_alive() for process in grid._processes)


def test_a_rank_that_dies_or_hangs_is_named(pool):
    grid = pool(CP2)
    grid.ask(None, "die")
    with pytest.raises(Ended, match="process of rank 1 ended by signal 6") as found:
        grid.answers()
    assert found.value.gone
    grid = pool(CP2)
    grid.timeout = 0.5
    grid.ask(None, "hang")
    with pytest.raises(Ended, match=r"no answer of rank 0 in 0.5 s \(--timeout\)"):
        grid.answers()


def test_one_rank_goes_on_after_a_lack_of_memory(pool):
    grid = pool(ONE)
    grid.ask(None, "lack")
    with pytest.raises(Ended) as found:
        grid.answers()
    assert found.value.reason == "rank 0" and not found.value.gone
    grid.ask(None, "measure")
    assert grid.answers() == [{"status": "ok", "rank": 0}]


def test_what_libraries_say_about_memory():
    from benchmarks.ranks.worker import failure

    assert failure(torch.OutOfMemoryError("x"))["status"] == "out of memory"
    nccl = failure(RuntimeError("NCCL error: CUDA failure 2 'out of memory'\nmore"))
    assert nccl["status"] == "out of memory" and "more" not in nccl["reason"]
    assert failure(ValueError("shape")) == {"status": "failed", "reason": "ValueError: shape"}
