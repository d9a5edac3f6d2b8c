"""Linears that FP8 leaves in bf16, and quantised weights read as plain tensors."""

import contextlib

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.layers.linears import bf16_linear, bf16_weight_linear, dequantised
from tests.host import attention_module, small_config, small_csa_config, start

QUANTISED = {"fp8": "hybrid", "transformer_impl": "transformer_engine"}


@pytest.fixture
def engine(monkeypatch):
    """Megatron's module of transformer-engine's layers, with a record of opened contexts."""
    start()
    from megatron.core.extensions import transformer_engine

    opened = []

    def context(kind):
        def open_context(enabled, **_settings):
            opened.append((kind, enabled))
            return contextlib.nullcontext()

        return open_context

    class State:
        """The state inside of an FP8 run."""

        is_fp8_enabled = staticmethod(lambda: True)

    monkeypatch.setattr(transformer_engine, "fp8_model_init", context("init"), raising=False)
    monkeypatch.setattr(transformer_engine, "fp8_autocast", context("product"), raising=False)
    monkeypatch.setattr(transformer_engine, "FP8GlobalStateManager", State, raising=False)
    transformer_engine.opened = opened
    yield transformer_engine
    del transformer_engine.opened


def linear_class(engine):
    """Return the precision part of Megatron's TELinear, whose base needs a GPU."""

    class Linear(torch.nn.Module):
        def __init__(self, quantization_config=None):
            super().__init__()
            self.finish_init(quantization_config)
            with engine._get_fp8_model_init_for_quant_params(self.te_quant_params, True):
                self.weight = torch.nn.Parameter(torch.ones(2, 2))

        def finish_init(self, quantization_config):
            self.te_quant_params = quantization_config

        def forward(self, x):
            with engine._get_fp8_autocast_for_quant_params(self.te_quant_params, self.training):
                return x @ self.weight.T

    return Linear


@pytest.mark.parametrize(
    ("make", "contexts"),
    [
        (lambda linear: linear, []),
        (bf16_linear, [("init", False), ("product", False)]),
        (bf16_weight_linear, [("init", False)]),
    ],
    ids=["quantised", "bf16", "bf16 weight"],
)
def test_contexts_that_a_linear_opens(make, contexts, engine):
    linear = make(linear_class(engine))
    linear()(torch.ones(2))
    linear().eval()(torch.ones(2))
    assert engine.opened == 2 * contexts
    assert make(linear_class(engine)) is not linear


def test_one_class_per_linear(engine):
    linear = linear_class(engine)
    assert bf16_linear(linear) is bf16_linear(linear) is not bf16_weight_linear(linear)


def test_a_file_that_names_a_layer_goes_first(engine):
    recipe = engine.TEQuantizationRecipe(override_quantized_autocast=False)
    given = engine.TEQuantizationParams(recipe, evaluation_recipe=None)
    assert bf16_linear(linear_class(engine))(given).te_quant_params is given


@pytest.fixture
def backend(monkeypatch):
    """transformer-engine's layers in specs, by name; the classes require the package."""
    start()
    from megatron_dsa import specs
    from megatron_dsa.layers import backends

    class Backend(specs.LocalBackend):
        linear = column_parallel_linear = row_parallel_linear = lambda self: "quantised"
        latent_linear = linear
        absorbed_linear = lambda self: "bf16 weight"  # noqa: E731
        indexer_linear = lambda self, fp8: "quantised" if fp8 else "bf16"  # noqa: E731

    monkeypatch.setattr(backends, "_te_backend", Backend)
    return specs


@pytest.mark.parametrize("fp8", [False, True])
def test_what_specs_quantise(fp8, backend):
    options = DSAOptions(fp8_indexer=fp8)
    sizes = {"dsa_indexer_n_heads": 8, "options": options}
    spec = backend.dsa_layer_spec(small_config(**QUANTISED | sizes)).submodules.self_attention
    kinds = spec.submodules
    assert kinds.linear_kv_up_proj == "bf16 weight"
    others = ("q_down_proj", "q_up_proj", "kv_down_proj", "proj")
    assert {getattr(kinds, f"linear_{name}") for name in others} == {"quantised"}
    indexer = kinds.core_attention.submodules.indexer.submodules
    of_indexer = {indexer.linear_wq_b, indexer.linear_wk, indexer.linear_weights_proj}
    assert of_indexer == {"quantised" if fp8 else "bf16"}

    spec = backend.dsa_layer_spec(small_csa_config(4, **QUANTISED | sizes)).submodules
    kinds = spec.self_attention.submodules
    assert kinds.linear_o_group_proj.__name__ == "ColumnParallelLinear"
    linear = kinds.core_attention.submodules.indexer.submodules.linear
    assert linear == "quantised" if fp8 else linear.__name__ == "ReplicatedLinear"


def test_specs_take_the_classes_of_transformer_engine(monkeypatch):
    start()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear

    from megatron_dsa.layers import backends

    monkeypatch.setattr(backends, "why_not_transformer_engine", lambda has_gpu: None)
    layers = backends.get_backend("transformer_engine")
    assert layers.indexer_linear(fp8=True) is TELinear
    assert layers.indexer_linear(fp8=False) is bf16_linear(TELinear)
    assert layers.absorbed_linear() is bf16_weight_linear(TEColumnParallelLinear)


class Eighths(torch.Tensor):
    """A weight stored in eighths, without gradient, like some of transformer-engine's."""

    def dequantize(self):
        return self.detach().as_subclass(torch.Tensor) / 8


def test_a_quantised_weight_is_read_dequantised(monkeypatch):
    """The gradient must reach the parameter."""
    start()
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Eighths)
    plain = torch.nn.Parameter(torch.ones(2, 3))
    assert dequantised(plain) is plain
    stored = torch.full((2, 3), 8.0).as_subclass(Eighths).requires_grad_()
    weight = dequantised(stored)
    assert type(weight) is torch.Tensor and weight.equal(plain)
    (weight * torch.arange(6.0).view(2, 3)).sum().backward()
    assert stored.grad.as_subclass(torch.Tensor).equal(torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("config", "reads"),
    [(small_config, 2), (lambda **x: small_csa_config(4, **x), 1)],
    ids=["dsa", "csa"],
)
def test_an_attention_reads_quantised_weights(config, reads, monkeypatch):
    from megatron_dsa.layers import linears

    module = attention_module(config(dtype=torch.float32))
    x = torch.randn(32, 1, 32, device=start())
    expected, _ = module(x, None)
    seen = []

    def recorded(weight):
        seen.append(weight.shape)
        return weight * 2

    monkeypatch.setattr(linears, "dequantised", recorded)
    assert not module(x, None)[0].equal(expected) and len(seen) == reads
