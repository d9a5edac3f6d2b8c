"""Masked dense attention in a layer equals sparse attention: outputs, losses, all gradients."""

import contextlib

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_dsa.config import DSAOptions
from megatron_dsa.dispatch import report, reset_report
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.modules.replay import IndexCapture, IndexReplay
from tests.cases.layouts import shuffled
from tests.cases.models import forward, gpt
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, packed, small_config, start

#: Where both round in fp64.
TOLERANCE = 1e-11
TOKENS = 64


@pytest.fixture(autouse=True)
def log():
    """A log of two layers."""
    start()
    IndexerLog._state.sums = None
    IndexerLog.create(2, start())
    yield IndexerLog
    IndexerLog._state.sums = None


def logged():
    """Return the figures that were recorded since the last call, by name and layer."""
    return {
        (name, layer): float(mean.value[layer])
        for name, mean in IndexerLog.reduce().items()
        for layer in range(2)
        if mean.count[layer]
    }


def step(attention, *, batch=1, lengths=None, padded=None, recomputed=False, **changes):
    """Return output, input gradient and parameter gradients of a layer, and what it logged."""
    options = DSAOptions(selected_attention=attention)
    module = attention_module(small_config(options=options, **changes)).train()
    packing = None if lengths is None else packed(*lengths, padded_lengths=padded)
    x = hidden_like(module, sum(padded or lengths or [TOKENS]), batch)

    def run(x):
        return module(x, None, packed_seq_params=packing)[0]

    reset_report()
    out = tensor_parallel.checkpoint(run, False, x) if recomputed else run(x)
    generator = torch.Generator().manual_seed(12)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out))
    ran = report()
    assert f"{attention}_attention_backward" in ran
    assert not any(name.startswith(OTHER[attention]) for name in ran)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "dx": x.grad} | gradients, logged()


OTHER = {"masked": "sparse_attention", "sparse": "masked_attention"}
CASES = {
    "unpacked": {},
    "two sequences": {"batch": 2},
    "packed": {"lengths": (1, 5, 1, 40, 17)},
    "padded": {"lengths": (5, 1, 17, 50), "padded": (8, 1, 24, 56)},
    "frozen indexer": {"dsa_indexer_loss_coeff": 0.0},
    "dense loss": {"dsa_indexer_use_sparse_loss": False},
    "dense loss, two sequences": {"dsa_indexer_use_sparse_loss": False, "batch": 2},
    "loss per token": {"calculate_per_token_loss": True},
    "no query latent": {"q_lora_rank": None, "qk_layernorm": False},
    "full recompute": {"recomputed": True},
} | {
    f"recompute {' '.join(modules)}, {'sparse' if sparse else 'dense'} loss": {
        "recompute_granularity": "selective",
        "recompute_modules": list(modules),
        "dsa_indexer_use_sparse_loss": sparse,
    }
    for modules in (("core_attn",), ("mla_up_proj",), ("core_attn", "mla_up_proj"))
    for sparse in (True, False)
}


def same(got, want, tolerance=TOLERANCE):
    assert got[0].keys() == want[0].keys()
    for name, expected in want[0].items():
        if expected is None:
            assert got[0][name] is None, name
            continue
        assert relative_error(got[0][name], expected) < tolerance, name
        assert expected.norm() > 0, name
    assert got[1].keys() == want[1].keys()
    for name, figure in want[1].items():
        assert got[1][name] == pytest.approx(figure, rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize("case", CASES)
def test_equals_sparse_attention(case):
    got, want = (step(attention, **CASES[case]) for attention in ("masked", "sparse"))
    same(got, want)
    names = {name for name, _ in want[1]}
    assert {"dsa attention mass captured", "dsa query overlap"} <= names
    assert ("indexer loss" in names) == (case != "frozen indexer")


def test_equals_sparse_attention_in_fp32():
    got, want = (step(attention, dtype=torch.float32) for attention in ("masked", "sparse"))
    same(got, want, 1e-5)


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
    same(*found)
    assert len(found[0][1]) == 1  # the loss


def model_step(attention, replayed=None, **changes):
    """Return the gradients of a small GPT model whose layers share selections, and its keys."""
    options = DSAOptions(selected_attention=attention)
    config = small_config(
        options=options, num_layers=4, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1,
        **changes,
    )  # fmt: skip
    model, capture = gpt(config), IndexCapture()
    IndexerLog._state.sums = None
    IndexerLog.create(4, start())
    given = contextlib.nullcontext() if replayed is None else IndexReplay(replayed).on(model)
    with capture.on(model), given:
        loss = forward(model, 1)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return ({"loss": loss.detach()} | gradients, logged()), capture.microbatches


BOTH = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}


@pytest.mark.parametrize("recompute", [{}, BOTH], ids=["", "recomputed"])
def test_layers_that_share_selections(recompute):
    """Layers 2 and 4 attend to the keys of the layer before."""
    (got, keys), (want, expected) = (model_step(x, **recompute) for x in ("masked", "sparse"))
    same(got, want)
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
    same(got, want)


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
    from megatron_dsa.sequence.layout import bshd_layout

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
