"""Specs for training scripts, and their models."""

import importlib

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.versions import why_not_transformer_engine
from tests.host import small_config, start


def specs():
    start()
    return importlib.import_module("megatron_dsa.specs")


def attention_of(layer_spec):
    return layer_spec.submodules.self_attention.module.__name__


def test_spec_flag_resolves_names():
    specs()
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    assert callable(import_module(("megatron_dsa.specs", "dsa_block_spec")))
    layer = import_module(("megatron_dsa.specs", "dsa_local_layer_spec"))
    assert isinstance(layer, ModuleSpec) and attention_of(layer) == "DSASelfAttention"


def test_callable_takes_a_provider_or_a_model_config():
    """Megatron-Bridge passes the provider (a transformer config), Megatron a model config."""

    class Model:
        transformer = small_config()

    for config in (Model.transformer, Model):
        block = specs().dsa_block_spec(config, vp_stage=None)
        assert [attention_of(layer) for layer in block.layer_specs] == ["DSASelfAttention"] * 2
    assert Model.transformer.experimental_attention_variant_loss_scale_func is not None


def test_expert_layers_follow_the_pattern():
    config = small_config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 0])
    block = specs().dsa_block_spec(config)
    kinds = [layer.submodules.mlp.func.__qualname__ for layer in block.layer_specs]
    assert kinds[0] == kinds[2] != kinds[1]


def test_transformer_engine_is_asked_for_by_name():
    config = small_config(transformer_impl="transformer_engine")
    if why_not_transformer_engine(torch.cuda.is_available()) is None:
        pytest.skip("transformer-engine can be used here")
    with pytest.raises(ConfigError, match="pip install 'megatron-dsa"):
        specs().dsa_block_spec(config)
    with pytest.raises(ConfigError, match="pip install 'megatron-dsa"):
        _ = specs().dsa_te_layer_spec


def test_object_form_trains_a_gpt_model():
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.metrics.log import LossScale

    config = small_config(dtype=torch.float32)
    model = GPTModel(
        config,
        specs().dsa_local_layer_spec,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        pre_process=True,
        post_process=True,
    ).to(start())
    tokens = torch.arange(32, device=start())[None]
    loss = model(tokens, tokens, None, labels=tokens).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    indexer = "decoder.layers.0.self_attention.core_attention.indexer.linear_wq_b.weight"
    assert gradients[indexer].norm() > 0
    assert isinstance(config.experimental_attention_variant_loss_scale_func, LossScale)


def test_parameter_names_are_the_checkpoint_contract():
    from tests.host import attention_module

    names = {name for name, _ in attention_module(small_config()).named_parameters()}
    indexer = "core_attention.indexer."
    assert names == {
        "linear_q_down_proj.weight",
        "q_layernorm.weight",
        "linear_q_up_proj.weight",
        "linear_kv_down_proj.weight",
        "kv_layernorm.weight",
        "linear_kv_up_proj.weight",
        "linear_proj.weight",
        f"{indexer}linear_wq_b.weight",
        f"{indexer}linear_wk.weight",
        f"{indexer}k_norm.weight",
        f"{indexer}k_norm.bias",
        f"{indexer}linear_weights_proj.weight",
    }
