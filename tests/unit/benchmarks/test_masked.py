"""Cases, causal lists, FLOP, verification and the peer of the family ``masked``."""

import math

import pytest
import torch

from benchmarks.__main__ import plan_of
from benchmarks.attention import lists as drawn_lists
from benchmarks.masked import LONGEST_TORCH, TINY, Case, _Measurer
from benchmarks.masked import inputs as masked_inputs
from benchmarks.masked.inputs import Inputs
from benchmarks.masked.shapes import FLASH4, OPERATIONS, PEER, PEERS, flops
from benchmarks.settings import Settings, Work
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.dense_attention.blocks import BLOCK_KERNELS
from megatron_dsa.ops.masked_attention.spec import ListedProbabilities
from megatron_dsa.testing import cases
from megatron_dsa.testing.masked_attention import expected_masked
from tests.helpers import relative_error

CASE = Case(200, heads=3, distribution="clustered:0.8", workspace_mib=1, **TINY)
CPU = torch.device("cpu")


def test_every_implementation_is_measured():
    _, plan = plan_of("masked", ["--tokens", "4096", "--heads", "16"])
    assert [case.distribution for case, _ in plan] == ["random", "clustered:0.8"]
    for _, works in plan:
        for operation, dispatched in OPERATIONS.items():
            ways = {work.way for work in works if work.part == operation}
            peers = {*PEERS} if operation != "teacher" else set()
            assert ways == {c.name for c in DISPATCHED[dispatched].candidates} | peers


def test_models():
    for model, dims, heads in (("v3.2", (128, 64, 128), [128, 64, 16]),
                               ("glm-5", (192, 64, 256), [64, 32, 8])):  # fmt: skip
        _, plan = plan_of("masked", ["--tokens", "4096", "--model", model])
        cases = [case for case, _ in plan if case.distribution == "random"]
        assert [case.heads for case in cases] == heads
        assert {(case.nope, case.rope, case.v) for case in cases} == {dims}


@pytest.mark.parametrize("options", [["--tokens", "2047"], ["--distributions", "clustered:2"]])
def test_options_that_cannot_be_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        plan_of("masked", options)
    assert options[-1] in capsys.readouterr().err


def test_flops_by_hand():
    # 2 * 128 heads * 4096 * 4097 / 2 pairs
    pairs = 128 * 4096 * 4097
    assert flops("forward", Case(4096)) == pairs * (192 + 128)
    assert flops("teacher", Case(4096)) == pairs * 192
    assert flops("backward", Case(4096)) == pairs * (3 * 192 + 2 * 128)


@pytest.mark.parametrize("elements", [2**26, 300])
@pytest.mark.parametrize("distribution", ["random", "clustered:0.8"])
def test_lists_are_causal(distribution, elements, monkeypatch):
    monkeypatch.setattr(drawn_lists, "MOST_ELEMENTS", elements)
    lists = drawn_lists.causal_lists(distribution, 200, 16, "cpu")
    assert lists.indices.dtype == torch.int32
    for position, (keys, valid) in enumerate(zip(lists.indices, lists.valid, strict=True)):
        count = min(position + 1, 16)
        chosen = keys[valid].tolist()
        assert chosen == sorted(set(chosen)) == keys[:count].tolist()
        assert chosen[0] >= 0 and chosen[-1] <= position
    assert lists.indices[15].tolist() == list(range(16))


def test_random_lists_are_uniform():
    lists = drawn_lists.causal_lists("random", 4000, 2, "cpu")
    middle = lists.indices[2:] / torch.arange(2, 4000)[:, None]
    assert float(middle.mean()) == pytest.approx(0.5, abs=0.02)


@pytest.fixture(scope="module")
def inputs():
    return Inputs(CASE, CPU)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_passes_verification(inputs, operation):
    found = inputs.compare(operation, "torch", inputs.call(operation, "torch")())
    assert not found.wrong() and 0 < found.worst_error < 4e-3


@pytest.mark.parametrize(("operation", "count"), [("forward", 2), ("teacher", 1), ("backward", 3)])
def test_verification_finds_errors(inputs, operation, count):
    """Each output is looked at: a wrong one alone is enough."""
    for place in range(count):
        wrong = [x.clone() for x in inputs.call(operation, "torch")()]
        for factor, error in ((1.03, pytest.approx(0.03, abs=0.01)), (math.nan, math.inf)):
            wrong[place] = wrong[place] * factor
            result = ListedProbabilities(*wrong) if operation == "teacher" else wrong
            found = inputs.compare(operation, "torch", result)
            assert found.wrong() and found.worst_error == error, (operation, place)


@pytest.mark.parametrize("place", [1, 2])
def test_verification_finds_wrong_keys(inputs, place):
    wrong = [x.clone() for x in inputs.call("teacher", "torch")()]
    wrong[place][-1] += 1
    assert inputs.compare("teacher", "torch", ListedProbabilities(*wrong)).wrong()


def test_calls_share_no_tiles(inputs, monkeypatch):
    """Else all calls but the first would be timed without finding them."""
    seen = []
    operation = DISPATCHED[OPERATIONS["forward"]]
    monkeypatch.setattr(type(operation), "run", lambda _self, _call, _policy, x: seen.append(x))
    call = inputs.call("forward", "torch")
    call(), call()
    assert seen[0].kept is not seen[1].kept and seen[0].q is seen[1].q


def dense(q, k, v, scale):
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    later = torch.ones(len(q), len(k)).triu(1).bool()
    p = logits.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", p, v.float()).to(q.dtype)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_peers_attend_to_all_visible_keys(inputs, operation, peer, monkeypatch):
    words = {PEER: "needs a GPU", FLASH4: "wrong GPU: this is the CPU"}[peer]
    with pytest.raises(ImplementationError, match=words):
        inputs.call(operation, peer)
    monkeypatch.setattr(masked_inputs, "require_cuda", lambda _device: None)
    monkeypatch.setattr(masked_inputs, "require_flash4", lambda _call: None)
    monkeypatch.setitem(masked_inputs.ATTENTIONS, "cudnn", dense)
    monkeypatch.setitem(masked_inputs.BLOCK_KERNELS, "flash4", BLOCK_KERNELS["torch"])
    result = inputs.call(operation, peer)()
    found = inputs.compare(operation, peer, result)
    assert not found.wrong() and 0 < found.worst_error < 5e-3
    masked = inputs.call(operation, "torch")()
    assert inputs.compare(operation, peer, masked[0] if operation == "forward" else masked).wrong()
    if operation == "backward":  # all leaves have gradients of their own
        k, v = inputs.case.kv.shape[2] - CASE.v, CASE.v
        assert [x.shape[2] for x in result] == [k + CASE.rope, k + CASE.rope, v]
        assert relative_error(result[0], masked[0]) > 0.1


def test_long_sequences_are_not_run_in_torch(inputs):
    measurer = object.__new__(_Measurer)
    measurer.case = Case(LONGEST_TORCH + 1)
    with pytest.raises(ImplementationError, match="tokens in torch"):
        next(measurer.measure(Work("forward", "torch")))


def test_rows_of_the_peer_say_that_it_has_no_mask(monkeypatch):
    monkeypatch.setattr(masked_inputs, "require_cuda", lambda _device: None)
    monkeypatch.setitem(masked_inputs.ATTENTIONS, "cudnn", dense)
    measurer = _Measurer(CASE, CPU, Settings("cpu", repeats=1, budget=0.1))
    ((part, result),) = measurer.measure(Work("forward", PEER))
    assert part == "forward" and result["status"] == "ok" and result["tflops"] > 0
    assert result["ran"] == "causal, without a mask of selected keys"


def test_the_reference_is_the_same_by_parts(inputs, monkeypatch):
    """One head and one token at a time, as memory makes it for long sequences."""
    monkeypatch.setattr(cases, "BUDGET_BYTES", 1)
    whole, parts = inputs._reference.expected, expected_masked(inputs.case)
    for name, tensor in vars(whole).items():
        assert tensor.shape == getattr(parts, name).shape
        assert relative_error(getattr(parts, name), tensor) < 1e-13, name
