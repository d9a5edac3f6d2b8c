"""Cases, index lists, FLOP and verification of the family ``attention``."""

import math
import sys
import types
from itertools import pairwise

import pytest
import torch

from benchmarks.__main__ import plan_of
from benchmarks.attention import lists, raw
from benchmarks.attention.inputs import Case, Inputs
from benchmarks.attention.lists import make_indices
from benchmarks.attention.shapes import OPERATIONS, PRESETS, flops
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import FORWARD, SparseAttentionInputs

DISTRIBUTIONS = ["random", "sorted", "clustered", "clustered:0.95", "clustered:0"]


def test_every_implementation_is_measured():
    _, plan = plan_of("attention", ["--presets", "v3.2", "--skv", "8192"])
    assert [case.distribution for case, _ in plan] == ["random", "clustered:0.8"]
    for _, works in plan:
        for operation, dispatched in OPERATIONS.items():
            ways = {work.way for work in works if work.part == operation}
            peers = {raw.WAY} if operation == "forward" else set()
            assert ways == {c.name for c in DISPATCHED[dispatched].candidates} | peers
            assert "torch" in ways


def test_flops_by_hand():
    v32, tiny = PRESETS["v3.2"], PRESETS["tiny"]
    # 2 * 4096 queries * 2048 keys * 128 heads = 2^31
    assert flops("forward", v32, 4096) == 2**31 * 1088
    assert flops("backward", v32, 4096) == 2**31 * 2752
    assert flops("teacher", v32, 4096) == 2**31 * 576
    assert flops("forward", tiny, 10) == 2 * 10 * 16 * 4 * (48 + 32)


# Verification


@pytest.fixture(scope="module")
def inputs():
    return Inputs(Case("tiny", 32, 96, "clustered", 1), torch.device("cpu"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_passes_verification(inputs, operation):
    found = inputs.compare(operation, "torch", inputs.call(operation, "torch")())
    assert not found.wrong() and 0 < found.worst_error < 4e-3


def test_verification_finds_errors(inputs):
    """Each output is looked at: a wrong one alone is enough."""

    def result(operation):
        found = inputs.call(operation, "torch")()
        found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        return [None if x is None else x.clone() for x in found]

    for operation, count in (("forward", 2), ("teacher", 1), ("backward", 3)):
        for place in range(count):
            wrong = result(operation)
            for factor, error in ((1.03, pytest.approx(0.03, abs=0.01)), (math.nan, math.inf)):
                wrong[place] *= factor
                found = inputs.compare(operation, "torch", wrong if count > 1 else wrong[0])
                assert found.wrong() and found.worst_error == error, (operation, place)


def test_an_implementation_that_cannot_run_says_why(inputs):
    for way in ("flashmla", raw.WAY):
        with pytest.raises(ImplementationError, match=r"wrong GPU.*the CPU"):
            inputs.call("forward", way)


def test_the_raw_kernel_is_timed_without_the_adapter(inputs, monkeypatch):
    """It gets the same tensors every time, of its own sizes, and is checked like the others."""
    calls = []

    def upstream(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        calls.append((q, kv, indices, attn_sink))
        assert q.shape[1:] == (64, 48) and indices.shape == (32, 1, 128) and kv.shape[1] == 1
        assert all(x.is_contiguous() for x in (q, kv, indices)) and attn_sink.shape == (64,)
        case = SparseAttentionInputs(
            q, kv[:, 0], indices[:, 0], d_v, sm_scale, topk_length, attn_sink, 2**20
        )
        out, lse, _ = unfused.forward(case)
        return out, lse, torch.where(lse == float("-inf"), float("inf"), lse)

    module = types.ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = upstream
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    (adapter,) = (c for c in FORWARD.candidates if c.name == raw.ADAPTER)
    monkeypatch.setattr(type(adapter), "reason", lambda *_: None)
    run = inputs.call("forward", raw.WAY)
    found = inputs.compare("forward", raw.WAY, run())
    assert not found.wrong() and 0 < found.worst_error < 4e-3
    run()
    assert len(calls) == 2 and all(x is y for x, y in zip(*calls, strict=True))
    out, top, lse = run()
    assert inputs.compare("forward", raw.WAY, (out * 1.03, top, lse)).wrong()
    assert inputs.compare("forward", raw.WAY, (out, top, lse * 1.03)).wrong()


# Index lists


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("queries", "skv", "topk"), [(40, 300, 128), (100, 128, 128), (7, 9, 1)])
def test_rows_are_distinct_and_valid(distribution, queries, skv, topk):
    indices = make_indices(distribution, queries, skv, topk, "cpu", seed=3)
    assert indices.shape == (queries, topk) and indices.dtype == torch.int32
    assert indices.min() >= 0 and indices.max() < skv
    ascending = indices.sort(dim=1).values
    assert (ascending[:, 1:] > ascending[:, :-1]).all()
    assert torch.equal(ascending, indices) == (distribution != "random" or topk == 1)
    # The same seed gives the same lists, to every implementation in every process.
    assert torch.equal(indices, make_indices(distribution, queries, skv, topk, "cpu", seed=3))
    if topk < skv / 2:
        other = make_indices(distribution, queries, skv, topk, "cpu", seed=4)
        assert not torch.equal(indices, other)


def test_random_lists_are_uniform_over_all_keys():
    indices = make_indices("random", 2000, 60, 15, "cpu")
    counts = torch.bincount(indices.flatten().long(), minlength=60).double()
    # Binomial with mean 500 and standard deviation 19.4
    assert counts.min() > 500 - 5 * 19.4 and counts.max() < 500 + 5 * 19.4
    first = torch.bincount(indices[:, 0].long(), minlength=60).double()
    assert first.min() > 0 and first.max() < 33.3 + 6 * 5.7


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 0.999])
def test_clustered_lists(share):
    queries, skv, topk = 200, 1400, 256
    indices = make_indices(f"clustered:{share}", queries, skv, topk, "cpu")
    position = torch.arange(skv - queries, skv)[:, None]
    assert (indices <= position).all()
    # The most recent 64 are always there, the others are older.
    assert torch.equal(indices[:, -64:].long(), position - torch.arange(63, -1, -1))
    # 63 of the recent keys are shared; of the others, all but the slots that move.
    shared = [len(set(a) & set(b)) for a, b in pairwise(indices.tolist())]
    expected = 63 + share * (topk - 64)
    assert sum(shared) / len(shared) == pytest.approx(expected, abs=0.002 * topk)
    if share < 0.9:  # over time the lists reach nearly the whole past
        assert len(indices.unique()) > 0.9 * skv


def test_clustered_lists_of_queries_with_few_keys_before_them():
    """A query that cannot see 128 keys stands where it sees exactly 128."""
    indices = make_indices("clustered", 200, 200, 128, "cpu")
    assert torch.equal(indices[:128], torch.arange(128, dtype=torch.int32).expand(128, -1))
    assert (indices[128:] <= torch.arange(128, 200)[:, None]).all()


def test_chunks_cover_everything_once(monkeypatch):
    assert list(lists._chunks(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(lists._chunks(2, 0)) == [slice(0, 1), slice(1, 2)]
    whole = make_indices("clustered", 50, 90, 16, "cpu")
    monkeypatch.setattr(lists, "_chunks", lambda total, size: iter(list(_pieces(total))))
    assert torch.equal(make_indices("clustered", 50, 90, 16, "cpu"), whole)


def _pieces(total):
    for first in range(0, total, 7):
        yield slice(first, min(total, first + 7))
