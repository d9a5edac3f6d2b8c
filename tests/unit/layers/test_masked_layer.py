"""Masked dense attention in a layer equals sparse attention: outputs, losses, all gradients."""

import contextlib

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.ops.dispatch import report
from tests.cases.layouts import shuffled
from tests.cases.log import empty_log, forget_log, logged
from tests.cases.models import forward, gpt
from tests.cases.steps import RECOMPUTED, STEPS, TOKENS, Step, check_same, selective, train
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, small_config, start


@pytest.fixture(autouse=True)
def log():
    """A log of two layers."""
    empty_log(2, start())
    yield
    forget_log()


def step(attention, case=Step(), **changes):
    """Return what :func:`train` does for a layer with an attention to selected keys."""
    options = DSAOptions(selected_attention=attention)
    module = attention_module(small_config(options=options, **case.changes | changes)).train()
    found = train(module, case)
    ran = report()
    assert f"{attention}_attention_backward" in ran
    assert not any(name.startswith(OTHER[attention]) for name in ran)
    return found


OTHER = {"masked": "sparse_attention", "sparse": "masked_attention"}
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}
CASES = (
    STEPS
    | {
        "frozen indexer": Step(changes={"dsa_indexer_loss_coeff": 0.0}),
        "dense loss": Step(changes=DENSE_LOSS),
        "dense loss, two sequences": Step(batch=2, changes=DENSE_LOSS),
    }
    | {
        f"recompute {' '.join(modules)}, {'sparse' if sparse else 'dense'} loss": Step(
            changes=selective(modules) | {"dsa_indexer_use_sparse_loss": sparse}
        )
        for modules in RECOMPUTED
        for sparse in (True, False)
    }
)


@pytest.mark.parametrize("case", CASES)
def test_equals_sparse_attention(case):
    got, want = (step(attention, CASES[case]) for attention in ("masked", "sparse"))
    check_same(got, want)
    names = {name for name, _ in want[1]}
    assert {"dsa attention mass captured", "dsa query overlap"} <= names
    assert ("indexer loss" in names) == (case != "frozen indexer")


def test_equals_sparse_attention_in_fp32():
    got, want = (step(attention, dtype=torch.float32) for attention in ("masked", "sparse"))
    check_same(got, want, 1e-5)


@pytest.mark.parametrize("sparse_loss", [True, False])
@pytest.mark.parametrize("coefficient", [0.7, 0.0])
def test_evaluation_equals_that_of_sparse_attention(sparse_loss, coefficient):
    found = []
    for attention in ("masked", "sparse"):
        options = DSAOptions(selected_attention=attention, evaluate_indexer=True)
        config = small_config(
            options=options, dsa_indexer_use_sparse_loss=sparse_loss,
            dsa_indexer_loss_coeff=coefficient,
        )  # fmt: skip
        module = attention_module(config).eval()
        with torch.no_grad():
            out, _ = module(hidden_like(module, TOKENS), None)
        found.append(({"out": out}, logged()))
    check_same(*found)
    assert len(found[0][1]) == 1  # the loss


def model_step(attention, replayed=None, **changes):
    """Return the gradients of a small GPT model whose layers share selections, and its keys."""
    options = DSAOptions(selected_attention=attention)
    config = small_config(
        options=options, num_layers=4, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1,
        **changes,
    )  # fmt: skip
    model, capture = gpt(config), IndexCapture()
    empty_log(4, start())
    given = contextlib.nullcontext() if replayed is None else IndexReplay(replayed).on(model)
    with capture.on(model), given:
        loss = forward(model, 1)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return ({"loss": loss.detach()} | gradients, logged()), capture.microbatches


@pytest.mark.parametrize("recompute", [{}, selective(RECOMPUTED[-1])], ids=["", "recomputed"])
def test_layers_that_share_selections(recompute):
    """Layers 2 and 4 attend to the keys of the layer before."""
    (got, keys), (want, expected) = (model_step(x, **recompute) for x in ("masked", "sparse"))
    check_same(got, want)
    assert sorted(keys[0]) == [1, 3]
    assert all(keys[0][layer].equal(expected[0][layer]) for layer in keys[0])


def test_replayed_keys():
    """In any order and fewer than the indexer selects."""
    _, captured = model_step("sparse")
    given = [{layer: shuffled(x)[:, :9] for layer, x in one.items()} for one in captured]
    for one in given:
        for positions in one.values():
            positions[:1] = -1
            positions[:1, 0] = 0  # the first token sees itself
    got, want = (model_step(attention, given)[0] for attention in ("masked", "sparse"))
    check_same(got, want)


def test_delayed_weight_gradients_are_those_of_the_up_projection():
    """The up projection of keys runs as a linear here, and enters sparse attention as a weight."""
    for attention in ("masked", "sparse"):
        options = DSAOptions(selected_attention=attention)
        module, called = attention_module(small_config(options=options)).train(), []
        for name, child in module.named_modules():
            if name.split(".")[-1].startswith("linear"):
                child.backward_dw = lambda name=name, called=called: called.append(name)
        module.backward_dw()
        assert ("linear_kv_up_proj" in called) == (attention == "masked")


def test_captured_mass_is_that_of_the_absorbed_form():
    from megatron_dsa.metrics.quality import captured_mass
    from megatron_dsa.ops.layout.layout import bshd_layout

    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, kv, k_pe = draw(20, 3, 6), draw(20, 3, 9), draw(20, 2)
    indices = torch.full((20, 4), -1, dtype=torch.int32)
    indices[:, 0] = torch.arange(20)
    plain = torch.cat([kv[..., :4], k_pe[:, None].expand(-1, 3, -1)], -1)
    layout = bshd_layout(20, 1, torch.device("cpu"))
    logits = torch.einsum("qhd,khd->qhk", q, plain) * 0.4
    visible = torch.ones(20, 20, dtype=torch.bool).tril()[:, None]
    own = logits.diagonal(dim1=0, dim2=2).t()
    expected = (own - logits.masked_fill(~visible, float("-inf")).logsumexp(-1)).exp()
    for workspace in (1, 2**20):
        got = captured_mass(
            q, kv, indices, own, layout, softmax_scale=0.4, k_pe=k_pe, workspace_bytes=workspace
        )
        assert relative_error(got, expected) < 1e-12
