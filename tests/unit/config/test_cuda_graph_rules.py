"""Rejected CUDA graphs, by rule."""

from types import SimpleNamespace

import pytest

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.rules.cuda_graphs import graph_rules, graphs_attention
from megatron_dsa.errors import ConfigError
from tests.host import small_config, small_csa_config, start

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("stage", ["sparse", "warmup", "dense"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_captured_in_every_stage(impl, stage, hybrid):
    options = DSAOptions(stage=stage)
    if hybrid:
        small_csa_config(4, options=options, cuda_graph_impl=impl)
    else:
        small_config(options=options, cuda_graph_impl=impl, dsa_indexer_topk_freq=2)


def test_attention_of_layers_with_experts():
    config = small_config(cuda_graph_impl="local", cuda_graph_modules=["attn"], **EXPERTS)
    assert graphs_attention(config)
    assert not graphs_attention(small_config(cuda_graph_impl="full_iteration"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (EXPERTS, "cannot capture layers with experts whole"),
        (EXPERTS | {"cuda_graph_impl": "full_iteration"}, "cannot capture layers with experts"),
        ({"cuda_graph_modules": ["mlp"]}, "--cuda-graph-modules must be unset .* got mlp"),
        (selective("core_attn"), "--recompute-modules must not name core_attn with"),
        (selective("mla_up_proj", "mlp"), "must not name mla_up_proj with"),
        (
            {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0},
            "--cuda-graph-warmup-steps must be at least 1",
        ),
        (
            {"cuda_graph_impl": "transformer_engine"},
            "--transformer-impl must be transformer_eng",
        ),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(**{"cuda_graph_impl": "local"} | changes)


@pytest.mark.parametrize("freq", [1, 2])
def test_a_frozen_warm_up_is_refused_for_transformer_engine(freq):
    start()
    given = small_config(options=DSAOptions(stage="warmup"), dsa_indexer_topk_freq=freq).__dict__
    given |= {"cuda_graph_impl": "transformer_engine", "transformer_impl": "transformer_engine"}
    config = SimpleNamespace(**given)
    (complaint,) = [text for ok, text in graph_rules(config, config.dsa) if not ok]
    assert "must not be used in a frozen warm-up" in complaint
    for options in (DSAOptions(stage="warmup", freeze_main=False), DSAOptions()):
        assert all(ok for ok, _ in graph_rules(config, options))


def test_parts_that_may_be_recomputed():
    small_config(cuda_graph_impl="local", **selective("mlp"))
    small_config(cuda_graph_impl="full_iteration", **selective("core_attn", "mla_up_proj"))
