"""The stack of hybrid models: its specs, in Megatron's HybridModel, and its operations."""

import importlib

import pytest
import torch

from megatron_dsa.errors import ConfigError
from tests.host import small_config, small_hybrid_config, start

VOCABULARY, LENGTH = 64, 32


def specs():
    start()
    return importlib.import_module("megatron_dsa.specs")


def hybrid_model(config, spec, pattern):
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    return HybridModel(
        config, spec, VOCABULARY, LENGTH, hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(start())  # fmt: skip


def loss_of(model):
    tokens = torch.arange(LENGTH, device=start())[None]
    loss = model(tokens, tokens, None, labels=tokens, loss_mask=torch.ones_like(tokens)).mean()
    loss.backward()
    return loss


def test_callable_and_object():
    specs()
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    made = import_module(("megatron_dsa.specs", "dsa_hybrid_stack_spec"))(small_hybrid_config("D-"))
    ready = import_module(("megatron_dsa.specs", "dsa_local_hybrid_stack_spec"))
    for spec in (made, ready):
        assert isinstance(spec, ModuleSpec)
        layer = spec.submodules.dsa_layer
        assert layer.submodules.self_attention.module.__name__ == "DSASelfAttention"


@pytest.mark.parametrize("ready", [False, True])
def test_trains_in_a_hybrid_model(ready):
    pattern = "D-D"
    config = small_hybrid_config(pattern, dtype=torch.float32)
    spec = specs().dsa_local_hybrid_stack_spec if ready else specs().dsa_hybrid_stack_spec(config)
    model = hybrid_model(config, spec, pattern)
    assert type(model.decoder.final_norm) is type(model.decoder.layers[0].input_layernorm)
    loss_of(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    for layer in (0, 2):
        indexer = f"decoder.layers.{layer}.self_attention.core_attention.indexer.linear_wq_b.weight"
        assert gradients[indexer].norm() > 0
    numbers = [layer.layer_number for layer in model.decoder.layers]
    assert numbers == [1, 2, 3]


def test_index_sharing_needs_the_pattern():
    config = small_config(num_layers=4, dsa_indexer_topk_freq=2)
    with pytest.raises(ConfigError, match="layer_pattern must be given"):
        hybrid_model(config, specs().dsa_local_hybrid_stack_spec, "D-D-")


def test_layers_that_reuse_have_no_indexer():
    pattern = "D-D-D--D-"
    config = small_hybrid_config(pattern, dtype=torch.float32, dsa_indexer_topk_freq=2)
    model = hybrid_model(config, specs().dsa_hybrid_stack_spec(config), pattern)
    cores = {
        layer.layer_number: layer.self_attention.core_attention
        for layer in model.decoder.layers
        if hasattr(layer.self_attention, "core_attention")
    }
    assert {number: core.indexer is not None for number, core in cores.items()} == {
        1: True, 3: False, 5: True, 8: False,
    }  # fmt: skip
    assert all(core.selecting_layers == (1, 5) for core in cores.values())
    loss_of(model)
    # Nothing of this microbatch remains for the next one.
    assert type(model.decoder.layers[0])._waiting is None


def test_other_layers_of_transformer_engine_stay_megatrons(monkeypatch):
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    config = small_hybrid_config("D-")
    config.transformer_impl = "transformer_engine"
    backend = specs().get_backend
    monkeypatch.setattr(specs(), "get_backend", lambda _kind: backend("local"))
    parts, megatron = specs().dsa_hybrid_stack_spec(config).submodules, hybrid_stack_spec.submodules
    changed = {name for name in vars(parts) if getattr(parts, name) is not getattr(megatron, name)}
    assert changed == {"dsa_layer"}


def test_the_object_of_transformer_engine_says_what_is_missing():
    from megatron_dsa.versions import why_not_transformer_engine

    if why_not_transformer_engine(torch.cuda.is_available()) is None:
        pytest.skip("transformer-engine can be used here")
    with pytest.raises(ConfigError, match="pip install 'megatron-dsa"):
        _ = specs().dsa_te_hybrid_stack_spec


def test_operations_are_those_of_a_gpt():
    from megatron_dsa.metrics.flops import model_work

    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    shared = {"dsa_indexer_topk_freq": 2, **experts}
    gpt = small_config(num_layers=4, moe_layer_freq=[0, 1, 1, 0], mtp_num_layers=1, **shared)
    hybrid = small_hybrid_config("D-DEDED-/D-", **shared)
    assert set(model_work(gpt, 64)) == set(model_work(hybrid, 64))
    more = small_hybrid_config("D-GDEDED-/D-", **shared)
    assert set(model_work(more, 64)) == set(model_work(hybrid, 64))
