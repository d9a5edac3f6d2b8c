"""The family ``layer``: ways compute the same, another result is a failure, peers."""

import dataclasses
import logging
import math
import re

import pytest
import torch

from benchmarks import layer
from benchmarks.layer import DENSE_WAYS, Case, graph, peers
from benchmarks.megatron_layer import Layer, LayerSpec, layer_config, shortened
from benchmarks.schema import long_rows
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, Peak
from megatron_dsa.errors import ImplementationError
from tests.helpers import relative_error
from tests.host import start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are for the CPU")


@pytest.mark.parametrize(
    "way", ["sparse", "recomputed", "masked", "dense", "ours-dense", "bundled"]
)
def test_ways_are_the_same_layer(way):
    """As long as every key is selected; the gradients of the indexer as well."""
    device, spec = start(), LayerSpec("tiny", 12, heads=4, workspace_mib=1)
    found = {}
    for name in ("ours", way):
        built, _ = peers.build(name, spec, device)
        out = built.forward()
        out.backward(built.gradient)
        gradients = {key: p.grad for key, p in built.module.named_parameters()}
        found[name] = {"out": out.detach(), "x": built.x.grad} | gradients
    ours, theirs = found["ours"], found[way]
    assert (set(theirs) == set(ours)) == (way not in DENSE_WAYS)
    for name, tensor in theirs.items():
        # The indexer's gradients are differences of bf16 scores that are nearly equal.
        limit = 0.1 if ".indexer." in name else 2e-2
        assert relative_error(tensor, ours[name]) < limit, name


def measurer():
    return layer._Measurer(Case("tiny", 64, heads=4), start(), Settings("cpu", repeats=2))


def test_another_output_is_a_failure(monkeypatch):
    plain = peers.with_weights

    def twice(module, source):
        with torch.no_grad():
            plain(module, source).linear_proj.weight.mul_(2)
        return module

    monkeypatch.setattr(peers, "with_weights", twice)
    measure = measurer().measure
    results = dict(measure(Work("step", "ours")))
    assert results["step"]["status"] == "ok" and "out_error" not in results["step"]
    ((part, result),) = measure(Work("step", "dense"))
    assert part == "step" and result["status"] == "failed"
    assert "not the results of ours" in result["reason"]
    assert result["out_error"] == pytest.approx(1, rel=0.05)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ImplementationError, match=r"^CUDA graphs need a GPU$"):
        next(measurer().measure(Work("step", "graph")))


class Replayed:
    """Stands for a CUDA graph of a layer's step: the step again, on what ``change`` makes of it."""

    change = staticmethod(lambda layer: None)
    peak_mib = 7.0

    def __init__(self, built, _clock):
        self.layer = built

    def replay(self):
        self.change(self.layer)
        return self.layer.step()


def negate_weights(built):
    with torch.no_grad():
        built.module.linear_proj.weight.neg_()


def overflow(built):
    built.module.linear_proj.weight.grad.fill_(torch.nan)


@pytest.mark.parametrize(
    ("ratio", "change", "error", "name"),
    [
        (None, lambda built: None, 0.0, ""),
        (4, lambda built: None, 0.0, ""),
        (None, negate_weights, 2.0, "out|gradient of "),
        (None, overflow, math.nan, "gradient of linear_proj.weight"),
    ],
)
def test_a_replay_is_compared_with_the_step(ratio, change, error, name, monkeypatch):
    monkeypatch.setattr(Replayed, "change", staticmethod(change))
    built = Layer(LayerSpec("tiny", 32, ratio, workspace_mib=1), start())
    for tensor in (*built.module.parameters(), built.x):
        tensor.grad = torch.ones_like(tensor)
    before = built.x.detach().clone()
    found, of = graph.largest_error(built, Replayed(built, None).replay)
    assert found == pytest.approx(error, rel=1e-2, abs=1e-6, nan_ok=True) and re.match(name, of)
    # Results of the tokens in another order are others.
    assert torch.equal(built.x, before.flip(0))


def test_a_captured_step(monkeypatch):
    """Its result has no errors of the way that ran before it; a wrong replay has failed."""
    one = measurer()
    monkeypatch.setattr(one.clock, "on_gpu", True)
    monkeypatch.setattr(one.clock, "wait", lambda: None)
    monkeypatch.setattr(layer, "Peak", lambda clock: Peak(Clock(one.device)))
    monkeypatch.setattr(layer, "still_works", lambda clock: True)
    monkeypatch.setattr(one.clock, "milliseconds", lambda call, count: [2.0] * count)
    monkeypatch.setattr(layer, "StepGraph", Replayed)
    monkeypatch.setattr(layer, "all_kernels_milliseconds", lambda call: 0.5)
    results = dict(one.measure(Work("step", "graph")))
    assert list(results) == ["step"]
    result = results["step"]
    assert result["status"] == "ok" and result["graph_error"] < 1e-6
    assert (result["peak_mib"], result["kernel_ms"]) == (7.0, 0.5)
    assert "masked_attention_forward=" in result["ran"] or "sparse_attention" in result["ran"]
    assert "out_error" not in result and long_rows("step", result)
    monkeypatch.setattr(Replayed, "change", staticmethod(negate_weights))
    with pytest.raises(RuntimeError, match="not the results of the uncaptured step: error 2 of "):
        dict(one.measure(Work("step", "graph")))


def test_wrong_ends_are_found():
    """As addresses that overflow would make them."""
    one, rows = measurer(), torch.arange(6.0).view(2, 3) + 1
    own = {"out": rows, "end": rows, "end_gradient": rows}
    assert one.agreement("ours", own) == {"status": "ok"}
    row = one.agreement("bundled", own | {"end": 1.2 * rows})
    assert row["status"] == "ok" and row["end_error"] == pytest.approx(0.2)
    assert "end_error" not in one.agreement("dense", own | {"end": -rows})
    row = one.agreement("bundled", own | {"end_gradient": -rows})
    assert row["status"] == "failed" and row["reason"].startswith("not the results of ours: end")
    row = one.agreement("bundled", own | {"end": rows / 0})
    assert row["reason"] == "output or gradient is not finite"
    # Where ours did not run there is nothing to compare with.
    assert measurer().agreement("bundled", own) == {"status": "ok"}


def test_what_may_fault_comes_last():
    from benchmarks.__main__ import plan_of

    _, plan = plan_of("layer", ["--presets", "v3.2", "--tokens", "8", "4"])
    assert [(case.tokens, case.heads) for case, _ in plan] == [
        (tokens, heads) for tokens in (4, 8) for heads in (128, 64, 16)
    ]  # fmt: skip
    for case, works in plan:
        ranks = ["sparse-rank", "masked-rank", "dense-rank"] if case.heads < 128 else []
        ways = ["ours", "sparse", "recomputed", "masked", "dense", "ours-dense", *ranks]
        assert [work.way for work in works] == [*ways, "graph", "bundled"]
    _, ((_, works),) = plan_of("layer", ["--presets", "v4-flash", "--tokens", "8", "--ratios", "4"])
    assert [work.way for work in works] == ["ours", "torch", "graph"]


def test_ours_is_chosen_for_the_length_of_the_case():
    """In the short step that compiles, too."""
    start()
    spec = Case("tiny", 8192, heads=4).spec()
    for one in (spec, shortened(spec, 4096)):
        assert layer_config(one).dsa.sequence_length == 8192
    assert layer_config(spec).dsa.selected_attention == "auto"


@pytest.mark.parametrize("way", ["sparse", "masked"])
def test_attention_without_fused_kernels_is_not_run(way):
    start()
    spec = dataclasses.replace(Case("tiny", 64, heads=4).spec(), selected_attention=way)
    config = layer_config(spec)
    with pytest.raises(ImplementationError, match=rf"^{way}_attention_\w+ is not fused here: \w+"):
        peers.require_fused(config, f"{way}_attention")
    peers.require_fused(config, "another_attention")


def test_short_steps_compile_what_long_ones_run():
    assert shortened(LayerSpec("v4-pro", 65536, 4, layers=3), 4096).tokens == 4096
    assert shortened(LayerSpec("v4-pro", 65536, 128, layers=3), 4096) == LayerSpec(
        "v4-pro", 65536, 128
    )


@pytest.mark.parametrize("ratio", [None, 4])
def test_a_chain_is_the_module_again_and_again(ratio):
    chain = Layer(LayerSpec("tiny", 128, ratio, layers=3, workspace_mib=1), start())
    x, module = chain.x.detach().clone().requires_grad_(), chain.module
    first = module(x, None)[0]
    second = module(between := x + first, None)[0]
    third = module(between + second, None)[0]
    third.backward(chain.gradient)
    squares = chain.first_step()
    assert squares["out"] == pytest.approx(float(third.detach().float().square().sum()), rel=1e-6)
    for ours, theirs in ((chain.forward().detach(), third.detach()), (chain.x.grad, x.grad)):
        assert float((ours - theirs).norm()) <= 1e-2 * float(theirs.norm())
    # One layer alone gives something else.
    assert float((third - first).norm()) > 0.1 * float(first.norm())


def test_declined_functions_of_megatron_are_named():
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    _, remark = peers.build("bundled", LayerSpec("tiny", 8, heads=4), start())
    assert remark.startswith("kernels=")
    before = dsa_kernels._LOGGER.level
    config = type("Config", (), {"dsa_kernel_backend": "tilelang"})()
    with peers.declined_hooks() as declined:
        for _ in range(2):
            dsa_kernels._log_declined_hook(config, "run_it", "backend returned None")
    assert declined == ["run_it"] and dsa_kernels._LOGGER.level == before
    assert not any(type(h).__name__ == "Listener" for h in dsa_kernels._LOGGER.handlers)
    assert logging.getLogger(dsa_kernels.__name__) is dsa_kernels._LOGGER


def test_the_fastest_dense_attention(monkeypatch):
    """The fastest one that runs; if none runs, the error has the reasons."""
    peers.fastest_attention.cache_clear()
    monkeypatch.setattr(peers, "TRIAL_ROWS", 16)
    plain = peers.ATTENTIONS["flash, padded"]

    def refuses(*_):
        raise RuntimeError("no kernel")

    def slow(*arguments):
        return plain(*arguments)

    milliseconds = iter((2.0, 1.0))

    class Clock:
        def __init__(self, _device):
            pass

        def milliseconds(self, call, count):
            call()
            return [next(milliseconds)] * count

    monkeypatch.setattr(peers, "Clock", Clock)
    device = torch.device("cpu")
    monkeypatch.setattr(peers, "ATTENTIONS", {"a": refuses, "b": slow, "c": plain})
    name, function = peers.fastest_attention(2, 24, 16, device)
    assert name == "c" and function is plain
    monkeypatch.setattr(peers, "ATTENTIONS", {"a": refuses})
    peers.fastest_attention.cache_clear()
    with pytest.raises(ImplementationError, match="a: no kernel"):
        peers.fastest_attention(2, 24, 16, device)
    peers.fastest_attention.cache_clear()


@pytest.mark.parametrize("most", [2**31 - 1, 300])
def test_padded_attention(most, monkeypatch):
    """Also by groups of heads: of 432 elements, 300 are one head."""
    monkeypatch.setattr(peers, "MOST_ELEMENTS", most)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(9, 2, 24, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(9, 2, 16, generator=generator).bfloat16()
    out = peers.ATTENTIONS["flash, padded"](q, k, v, 0.3)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.3
    p = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    assert out.shape == v.shape
    assert relative_error(out, torch.einsum("hqk,khd->qhd", p, v.double())) < 1e-2
