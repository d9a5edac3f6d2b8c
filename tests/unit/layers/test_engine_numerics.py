"""Layers that select by scores in the arithmetic of inference engines."""

import dataclasses
import re

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.layers.core import CoreAttention
from tests.cases.models import CORE, MODELS, SELECTING, forward, full, gpt
from tests.host import small_config, small_csa_config
from tests.reference import engine_scores as reference

ENGINE = DSAOptions(indexer_numerics="deepgemm-fp8")


@pytest.fixture(autouse=True)
def log():
    """Let models allocate the log for their layers."""
    from megatron_dsa.metrics.log import IndexerLog

    IndexerLog._state.sums = None
    yield
    IndexerLog._state.sums = None


def model_of(kind, options, dtype=torch.float32, **settings):
    config, arguments, changes = MODELS[kind]
    given = changes.get("options", DSAOptions())
    numerics = options.indexer_numerics
    options = dataclasses.replace(given, indexer_numerics=numerics)
    return gpt(config(*arguments, **changes | settings | {"options": options}, dtype=dtype))


@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_selects_what_the_reference_does(kind, monkeypatch):
    calls, original = [], CoreAttention.topk

    def recorded(core, inputs, *arguments):
        made = original(core, inputs, *arguments)
        calls.append((inputs, made[0]))
        return made

    monkeypatch.setattr(CoreAttention, "topk", recorded)
    model = model_of(kind, ENGINE, torch.bfloat16)
    raw = []
    for name, module in model.named_modules():
        if name.endswith("linear_weights_proj"):
            module.register_forward_hook(lambda _, __, out: raw.append(out[0].detach()))
    forward(model, 1)
    assert len(calls) == len(raw) == len(SELECTING[kind])
    for (inputs, indices), weights in zip(calls, raw, strict=True):
        heads, dim = inputs.q.shape[1:]
        want = weights.flatten(0, 1).float() * heads**-0.5 * dim**-0.5
        assert torch.equal(inputs.fp32_weights, want)
        assert inputs.weights.dtype == torch.bfloat16
        q, k = (x.detach().double().cpu().numpy() for x in (inputs.q, inputs.k))
        pad = -heads % 8
        q = torch.nn.functional.pad(torch.from_numpy(q), (0, 0, 0, pad)).numpy()
        made = reference.scores(q, k, torch.nn.functional.pad(want.cpu(), (0, pad)).numpy())
        ratio = 64 // len(k)
        seen = [(t + 1) // ratio for t in range(64)]
        lists = reference.best(made, seen, indices.shape[1])
        assert torch.equal(indices, torch.from_numpy(lists).to(indices))


@pytest.mark.parametrize("recompute", [{}, full(1), CORE], ids=["", "full", "core"])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_exact_scores(kind, recompute):
    """A model with exact scores gets the same keys: scores only select."""
    model, exact = (model_of(kind, x, **recompute) for x in (ENGINE, DSAOptions()))
    capture, own = IndexCapture(), IndexCapture()
    with capture.on(model):
        forward(model, 1).backward()
    with own.on(exact):
        forward(exact, 1)
    exact.zero_grad()
    with IndexReplay(capture.microbatches).on(exact):
        forward(exact, 1).backward()
    selections = zip(capture.microbatches[0].values(), own.microbatches[0].values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in selections)
    theirs = dict(exact.named_parameters())
    trained = [n for n, p in model.named_parameters() if p.grad is not None]
    assert any("indexer" in name for name in trained)
    for name in trained:
        got, want = dict(model.named_parameters())[name].grad, theirs[name].grad
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * scale + 1e-9, msg=name)


@pytest.mark.parametrize("make", [small_config, lambda **x: small_csa_config(4, **x)])
def test_what_cannot_work_is_refused_by_name(make):
    from megatron_dsa.config.model import validate

    for changes, message in (
        ({"dsa_indexer_scoring_relu": False}, "--no-dsa-indexer-scoring-relu must not be used"),
        ({"dsa_indexer_head_dim": 256}, "--dsa-indexer-head-dim must be at most 128 with"),
        ({"dsa_indexer_head_dim": 96}, "--dsa-indexer-head-dim must be a power of two"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            validate(make(**{"options": ENGINE} | changes))
    validate(make(options=ENGINE))
    with pytest.raises(ConfigError, match="one of exact, deepgemm-fp8"):
        DSAOptions(indexer_numerics="fp8")
