"""What a child process of the attention benchmark does: inputs, verification, timing."""

import pytest
import torch

from benchmarks import cases, measure, timing
from benchmarks.cases import Group, Measurement
from benchmarks.verify import Verifier, WrongResult, largest_error
from megatron_dsa.errors import ImplementationError
from megatron_dsa.sequence.layout import bshd_layout


def test_layout_of_the_last_queries():
    """It is the end of the whole sequence's layout."""
    whole = bshd_layout(12, 1, torch.device("cpu"))
    last = measure.last_queries_layout(5, 12, torch.device("cpu"))
    assert torch.equal(last.end, whole.end[-5:]) and torch.equal(last.start, whole.start[-5:])
    assert torch.equal(last.position, whole.position[-5:])
    (block,) = last.blocks(lambda width: 100)
    assert (block.lo, block.hi) == (0, 12) and block.rows == slice(0, 5, 1)
    assert [(b.lo, b.hi) for b in last.blocks(lambda width: 2)] == [(0, 9), (0, 11), (0, 12)]


@pytest.fixture(scope="module")
def inputs():
    return measure.Inputs(Group("tiny", 32, 96, "clustered"), torch.device("cpu"), 2**20)


@pytest.fixture(scope="module")
def verifier(inputs):
    return Verifier(inputs)


@pytest.mark.parametrize("operation", list(cases.PARTS))
def test_torch_passes_verification(inputs, verifier, operation):
    m = Measurement(operation, ("torch",) * len(cases.PARTS[operation]))
    assert inputs.reason(m) is None
    assert verifier.error(operation, inputs.call(m)()) < 4e-3


def test_verification_finds_errors(inputs, verifier):
    """Each output is looked at: a wrong one alone is enough."""

    def result(operation):
        m = Measurement(operation, ("torch",) * len(cases.PARTS[operation]))
        return [None if x is None else x.clone() for x in as_tuple(inputs.call(m)())]

    for operation, count in (("forward", 2), ("teacher", 1), ("backward", 3), ("loss", 4)):
        for place in range(count):
            wrong = result(operation)
            wrong[place] *= 1.03
            error = verifier.error(operation, wrong if count > 1 else wrong[0])
            assert 0.02 < error < 0.04, (operation, place)
            wrong[place] *= float("nan")
            assert verifier.error(operation, wrong if count > 1 else wrong[0]) == float("inf")
    dkv = result("backward")
    dkv[1][verifier.keys[0]] = 0
    assert verifier.error("backward", dkv) > 0.02


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def test_verification_of_a_selection(inputs, verifier):
    row = int(verifier.rows[1])
    m = Measurement("topk", ("torch", "torch"))
    for change, message in (
        (lambda indices, length: indices[row, 1].copy_(indices[row, 0]), "selects 15 keys"),
        (lambda indices, length: length[row].sub_(1), "selects 15 keys"),
        (lambda indices, length: indices[row, 0].fill_(95), "does not see"),
        (lambda indices, length: indices[row, 0].fill_(-1), "does not see"),
    ):
        indices, length = inputs.call(m)()
        assert int(inputs.layout.end[row]) < 95
        change(indices, length)
        with pytest.raises(WrongResult, match=message):
            verifier.topk((indices, length))
    indices, length = inputs.call(m)()
    seen = int(inputs.layout.end[row])
    unselected = sorted(set(range(seen)) - set(indices[row].tolist()))
    indices[row] = torch.tensor(unselected[:16], dtype=torch.int32)
    assert verifier.topk((indices, length)) > timing.ERROR_LIMIT


def test_reasons_name_the_part(inputs):
    reason = inputs.reason(Measurement("topk", ("torch", "cudnn")))
    assert reason.startswith("indexer_topk: wrong GPU") and "the CPU" in reason
    assert inputs.reason(Measurement("forward", ("flashmla",))).startswith("wrong GPU")


def test_measure_checks_before_it_times():
    clock = timing.Clock(torch.device("cpu"))
    calls = []
    call = lambda: calls.append(1) or torch.ones(2)  # noqa: E731
    row = timing.measure(call, lambda result: 0.5, clock, 3, 1.0)
    assert row["status"] == "failed" and "0.5 is above 0.01" in row["reason"] and len(calls) == 1
    assert timing.measure(call, lambda r: float("nan"), clock, 3, 1.0)["status"] == "failed"
    row = timing.measure(call, lambda result: float(result.sum()) - 2, clock, 3, 1.0)
    assert row["status"] == "ok" and row["repeats"] == 3 and row["rel_error"] == 0
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]


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


def test_outcomes_are_kept_apart():
    def fails(error):
        raise error

    assert measure.outcome(dict, [("status", "ok")]) == {"status": "ok"}
    assert measure.outcome(fails, ImplementationError("no")) == {
        "status": "skipped", "reason": "no"
    }  # fmt: skip
    row = measure.outcome(fails, RuntimeError("out of memory\nadvice\nadvice"))
    assert row == {"status": "failed", "reason": "RuntimeError: out of memory"}


def test_largest_error():
    one = torch.ones(4)
    assert largest_error((one, one), (one * 1.5, one)) == pytest.approx(0.5)
    assert largest_error((one * float("inf"), one)) == float("inf")
