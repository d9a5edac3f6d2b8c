"""Index queries recomputed by a layer's backward: conditions, and unchanged results."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers import dsa_indexer
from megatron_dsa.layers.dsa_indexer import DSAIndexer
from megatron_dsa.layers.linears import uses_plain_weight
from megatron_dsa.ops.indexer_loss.training import LatentIndexerInputs, LatentQueries
from tests.cases.layers import in_small_blocks
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, small_config, v32_config

RECOMPUTE = {
    "none": {},
    "core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "both": {
        "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"],
    },
}  # fmt: skip


def layer(attention="sparse", recompute="none", options=None, **changes):
    options = options or DSAOptions(selected_attention=attention)
    config = small_config(options=options, **RECOMPUTE[recompute], **changes)
    return attention_module(config).train()


def step(module, rows=64):
    x = hidden_like(module, rows).detach().requires_grad_()
    out = module(x, None)[0]
    (
        out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
    ).sum().backward()
    return {"out": out, "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


@pytest.fixture
def kinds(monkeypatch):
    """Return the kinds of indexers' results, in order."""
    found, forward = [], DSAIndexer.forward

    def recorded(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        found.append(isinstance(result, LatentIndexerInputs))
        return result

    monkeypatch.setattr(DSAIndexer, "forward", recorded)
    return found


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_steps_are_those_of_queries_that_are_kept(attention, recompute, blocks, kinds, monkeypatch):
    options = DSAOptions(selected_attention=attention)
    options = in_small_blocks(options) if blocks else options
    found = step(layer(options=options, recompute=recompute))
    assert kinds == [True]
    monkeypatch.setattr(dsa_indexer, "can_read_weight", lambda *_: False)
    expected = step(layer(options=options, recompute=recompute))
    assert kinds == [True, False]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert relative_error(found[name], gradient) < 1e-11, name


@pytest.mark.parametrize(
    ("changes", "training", "remade"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"dsa_indexer_use_sparse_loss": False}, True, False),
        ({"dsa_indexer_loss_coeff": 0.0}, True, False),
        ({"options": DSAOptions("warmup")}, True, False),
        ({"options": DSAOptions("warmup", freeze_main=False)}, True, False),
    ],
    ids=["trained", "evaluated", "dense loss", "no loss", "frozen", "warmup"],
)
def test_when_queries_are_made_again(changes, training, remade, kinds):
    module = layer(**changes).train(training)
    module(hidden_like(module, 64), None)
    assert kinds == [remade]


def test_a_linear_with_a_hook_is_called(kinds):
    module, called = layer(), []
    linear = module.core_attention.indexer.linear_wq_b
    linear.register_forward_hook(lambda *_: called.append(1))
    step(module)
    assert kinds == [False] and called == [1]


def test_a_linear_of_another_class_is_called(kinds):
    module = layer()
    indexer = module.core_attention.indexer

    class Adapted(type(indexer.linear_wq_b)):
        def forward(self, x):
            return 2 * super().forward(x)[0], None

    indexer.linear_wq_b.__class__ = Adapted
    step(module)
    assert kinds == [False]


def test_what_waits_for_the_weight_runs_before_it_is_read(kinds):
    """``--overlap-param-gather`` attaches a wait to the module's call."""
    module, waited = layer(), []
    linear = module.core_attention.indexer.linear_wq_b
    expected = step(layer())
    weight = linear.weight.detach().clone()
    linear.weight.data.zero_()

    def wait(*_):
        waited.append(1)
        linear.weight.data.copy_(weight)

    linear.register_forward_pre_hook(wait)
    found = step(module)
    assert kinds == [True, True] and waited == [1]
    assert torch.equal(found["out"], expected["out"])


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_weight_takes_one_gradient_per_step(recompute):
    """Data parallelism counts it: a hook on the accumulated gradient must run once."""
    module, taken = layer(recompute=recompute), []
    weight = module.core_attention.indexer.linear_wq_b.weight
    weight.register_post_accumulate_grad_hook(lambda p: taken.append(p.grad.clone()))
    step(module)
    assert len(taken) == 1 and taken[0].dtype == weight.dtype and taken[0].norm() > 0
    step(module)  # of another microbatch
    assert len(taken) == 2 and relative_error(taken[1], 2 * taken[0]) < 1e-12


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_all_queries_exist_once_per_pass(recompute, monkeypatch):
    """Checked queries are used for selection; a recomputed selection makes its own."""
    made, compute = [], LatentQueries.compute

    def recorded(self, tokens=slice(None)):
        q = compute(self, tokens)
        made.append(q)
        return q

    monkeypatch.setattr(LatentQueries, "compute", recorded)
    module = layer(options=in_small_blocks(DSAOptions()), recompute=recompute)
    x = hidden_like(module, 64).detach().requires_grad_()
    out = module(x, None)[0]
    assert [len(q) for q in made] == [64]
    out.sum().backward()
    whole = [q for q in made if len(q) == 64]
    assert len(whole) == (1 if recompute == "none" else 2)
    assert all(torch.equal(q, whole[0]) for q in whole)
    assert sum(len(q) for q in made) == 64 * (len(whole) + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device assert there ends the process")
def test_scores_that_are_not_finite_are_refused():
    module = layer()
    module.core_attention.indexer.linear_wq_b.weight.data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="layer 1: index scores must be finite"):
        step(module)


def recipe(quantised=True, nonquantised=False, fp8=None, fp4=None):
    return SimpleNamespace(
        training_recipe=SimpleNamespace(
            override_quantized_autocast=quantised, override_nonquantized_autocast=nonquantised,
            fp8_quantization_recipe=fp8, fp4_quantization_recipe=fp4,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fp8", "params", "plain"),
    [
        (None, None, True),
        ("hybrid", None, False),
        ("hybrid", recipe(), True),  # as bf16_linear makes it
        ("hybrid", recipe(quantised=False), False),
        ("hybrid", recipe(fp8="blockwise"), False),
        (None, recipe(fp8="blockwise"), True),
        (None, recipe(nonquantised=True, fp8="blockwise"), False),
        (None, recipe(nonquantised=True, fp4="nvfp4"), False),
    ],
)
def test_a_quantised_linear_is_called(fp8, params, plain):
    config = SimpleNamespace(fp8=fp8, fp4=None)
    assert uses_plain_weight(SimpleNamespace(te_quant_params=params), config) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_steps_of_v3_2_are_those_of_queries_that_are_kept(attention, kinds, monkeypatch):
    options = DSAOptions(selected_attention=attention, health_tokens=0, sequence_length=4096)
    config = v32_config(options)
    torch.cuda.manual_seed(1)  # draws the loss's query tokens
    found = step(attention_module(config).train(), 4096)
    monkeypatch.setattr(dsa_indexer, "can_read_weight", lambda *_: False)
    torch.cuda.manual_seed(1)
    expected = step(attention_module(config).train(), 4096)
    assert kinds == [True, False]
    for name, gradient in expected.items():
        error = relative_error(found[name], gradient)
        print(f"{attention} {name}: {error:.1e}")
        assert gradient.norm() > 0 and error < 1e-2, name
