"""Megatron's linears without Apex, in a model with fused gradient accumulation."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.patches import unfused_linears
from tests.host import small_config


@pytest.fixture
def linears(monkeypatch):
    """Both of Megatron's linears, patched for a test, and their module."""
    from megatron.core.tensor_parallel import layers

    for name in ("ColumnParallelLinear", "RowParallelLinear"):
        cls = getattr(layers, name)
        monkeypatch.setattr(cls, "__init__", cls.__init__)  # restored afterwards
    unfused_linears.leave_linears_unfused_without_apex.cache_clear()
    yield layers
    unfused_linears.leave_linears_unfused_without_apex.cache_clear()


def column(layers, config):
    return layers.ColumnParallelLinear(
        8, 6, config=config, init_method=torch.nn.init.zeros_, bias=False
    )


def row(layers, config):
    return layers.RowParallelLinear(
        8, 6, config=config, init_method=torch.nn.init.zeros_, bias=False,
        input_is_parallel=True, skip_bias_add=True,
    )  # fmt: skip


def fused_config(**changes):
    config = small_config(dtype=torch.float32)
    config.gradient_accumulation_fusion = True
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_they_leave_gradients_to_autograd(linears):
    """The row-parallel one would fail only in its backward. The others must still fuse."""
    config = fused_config()
    assert not linears._grad_accum_fusion_available
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        column(linears, config)
    unfused_linears.leave_linears_unfused_without_apex()
    for make in (column, row):
        linear = make(linears, config)
        assert not linear.gradient_accumulation_fusion and config.gradient_accumulation_fusion
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        out, _ = linear(torch.ones(3, 8))
        out.sum().backward()
        assert linear.weight.grad.eq(3).all() and not linear.weight.main_grad.any()


def test_with_apex_nothing_changes(linears, monkeypatch):
    monkeypatch.setattr(linears, "_grad_accum_fusion_available", True)
    before = linears.ColumnParallelLinear.__init__
    unfused_linears.leave_linears_unfused_without_apex()
    assert linears.ColumnParallelLinear.__init__ is before
    assert column(linears, fused_config()).gradient_accumulation_fusion


def test_deferred_gradients_of_the_output_layer_need_apex(linears):
    unfused_linears.leave_linears_unfused_without_apex()
    config = fused_config(defer_embedding_wgrad_compute=True)
    with pytest.raises(ConfigError, match=r"--defer-embedding-wgrad-compute needs Apex"):
        column(linears, config)
    assert config.gradient_accumulation_fusion
