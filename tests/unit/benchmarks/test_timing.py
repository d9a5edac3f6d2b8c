"""Timing: checks before timing, medians and spread, errors."""

import pytest
import torch

from benchmarks import timing
from megatron_dsa.testing.comparison import Comparison


def with_error(error):
    return Comparison(5e-3, errors={"out": error})


def test_measure_checks_before_it_times():
    clock = timing.Clock(torch.device("cpu"))
    calls = []
    call = lambda: calls.append(1) or torch.ones(2)  # noqa: E731
    row = timing.measure(call, lambda result: with_error(0.5), clock, 3, 1.0)
    assert row["status"] == "failed" and len(calls) == 1
    assert row["reason"] == "wrong result: out 5.0e-01" and row["rel_error"] == 0.5
    row = timing.measure(call, lambda r: with_error(float("nan")), clock, 3, 1.0)
    assert row["status"] == "failed" and row["rel_error"] == float("inf")
    broken = Comparison(5e-3, complaints=["not ascending"])
    row = timing.measure(call, lambda r: broken, clock, 3, 1.0)
    assert row["reason"] == "wrong result: not ascending"
    row = timing.measure(call, lambda result: with_error(float(result.sum()) - 2), clock, 3, 1.0)
    assert row["status"] == "ok" and row["repeats"] == 3 and row["rel_error"] == 0
    assert 0 < row["p10"] <= row["ms"] <= row["p90"]


def test_slow_calls_are_repeated_less():
    class Slow(timing.Clock):
        def seconds(self, call):
            call()
            return 4.0

    clock = Slow(torch.device("cpu"))
    call = lambda: None  # noqa: E731
    assert timing.measure(call, None, clock, 30, budget=10.0)["repeats"] == 2
    assert timing.measure(call, None, clock, 30, budget=1.0)["repeats"] == 1


def test_quantiles_by_hand():
    assert timing.quantile([4.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.quantile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert timing.quantile([7.0], 0.1) == 7.0


def test_summary_of_times():
    assert timing.summary([3.0, 1.0, 2.0]) == {
        "ms": 2.0, "p10": pytest.approx(1.2), "p90": pytest.approx(2.8), "repeats": 3,
    }  # fmt: skip
