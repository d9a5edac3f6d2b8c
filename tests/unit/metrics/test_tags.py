"""TensorBoard and W&B values, their tags, and times of operations."""

import math
import threading
import time

import pytest
import torch

from megatron_dsa.metrics.quality import Mean
from megatron_dsa.metrics.tags import FIGURES, MFU, calls_tag, layer_tag, time_tag
from megatron_dsa.ops.dispatch.operation import OperationTimes
from tests.functional.launch import REPOSITORY
from tests.host import start
from tests.writers import Board, Wandb


@pytest.fixture
def log():
    from megatron_dsa.metrics.log import IndexerLog

    before, IndexerLog._state.sums = IndexerLog._state.sums, None
    IndexerLog.create(2, start())
    yield IndexerLog
    IndexerLog._state.sums = before


def test_both_writers_get_means_and_every_layer(log):
    device = start()
    log.record(0, {"indexer loss": torch.tensor(1.0, device=device)})
    log.record(1, {"indexer loss": torch.tensor(4.0, device=device)})
    overlap = Mean(torch.tensor(3.0, device=device), torch.tensor(4, device=device))
    log.record(1, {"dsa query overlap": overlap})
    board, wandb, total = Board(), Wandb(), {}
    log.log(5, total, False, board, wandb)
    expected = {
        "dsa/indexer-loss": 2.5,
        "dsa/indexer-loss/layer-1": 1.0,
        "dsa/indexer-loss/layer-2": 4.0,
        "dsa/query-overlap": 0.75,
        "dsa/query-overlap/layer-2": 0.75,
    }
    assert board.scalars == [(tag, value, 5) for tag, value in expected.items()]
    assert wandb.logged == [(expected, 5)]
    assert {name: float(value) for name, value in total.items()} == {
        "indexer loss": 2.5,
        "dsa query overlap": 0.75,
    }
    log.log(6, total, False, board, wandb)
    assert len(wandb.logged) == 1  # nothing new was recorded


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_not_left_out(wrong, log, capsys):
    """The mean must become NaN, which Megatron's log line omits, and a line names the layer."""
    device = start()
    for layer, value in enumerate((1.0, wrong)):
        log.record(layer, {"indexer loss": torch.tensor(value, device=device)})
    log.record(0, {"dsa attention mass captured": torch.tensor(0.5, device=device)})
    board, total = Board(), {}
    log.log(5, total, False, board)
    assert capsys.readouterr().out == "> indexer loss is not finite in layer(s) 2 (iteration 5)\n"
    written = {tag: value for tag, value, _ in board.scalars}
    assert written.pop("dsa/indexer-loss/layer-2") == pytest.approx(wrong, nan_ok=True)
    assert written.pop("dsa/indexer-loss") == pytest.approx(wrong, nan_ok=True)
    assert written == {
        "dsa/indexer-loss/layer-1": 1.0,
        "dsa/mass-captured": 0.5,
        "dsa/mass-captured/layer-1": 0.5,
    }
    assert float(total["indexer loss"]) == pytest.approx(wrong, nan_ok=True)
    assert float(total["dsa attention mass captured"]) == 0.5


def test_every_tag_is_documented():
    text = (REPOSITORY / "docs" / "guide" / "reports.md").read_text(encoding="utf-8")
    tags = [*FIGURES.values(), MFU, layer_tag("...", "N")]
    tags += [calls_tag("OPERATION", "IMPLEMENTATION"), time_tag("OPERATION")]
    assert [tag for tag in tags if f"`{tag}`" not in text] == []
    assert len(set(tags)) == len(tags)
    assert all(tag.startswith(("dsa/", "...")) and " " not in tag for tag in tags)


def measured(times, cuda, work):
    """Return times of an outer operation and an inner one with three times the work."""
    with times.measure("outer", cuda):
        work(1)
        with times.measure("inner", cuda):
            work(3)
    return times.take()


def test_an_operation_within_another_counts_once(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work(amount):
        clock[0] += amount

    times = OperationTimes()
    assert measured(times, False, work) == {}  # off by default
    times.on = True
    assert measured(times, False, work) == {"inner": 3, "outer": 1}
    assert times.take() == {}
    times.paused = True
    assert measured(times, False, work) == {}


def test_backward_threads_do_not_nest_in_the_forward():
    times = OperationTimes()
    times.on = True

    def backward():
        with times.measure("backward", False):
            time.sleep(0.02)

    with times.measure("forward", False):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert times.take()["forward"] >= 0.02


@pytest.mark.gpu
def test_gpu_time_is_that_of_the_stream():
    """Launches return at once, so GPU events are timed."""
    times = OperationTimes()
    times.on = True
    a = torch.randn(4096, 4096, device="cuda")

    def work(amount):
        for _ in range(10 * amount):
            a @ a

    measured(times, True, work)
    seconds = measured(times, True, work)
    assert 2 < seconds["inner"] / seconds["outer"] < 4
    assert seconds["outer"] > 10 * 2 * 4096**3 / 1e15  # no GPU does it faster in fp32
