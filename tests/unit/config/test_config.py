"""Rejected configurations: messages name the argument, the rule and the fix."""

import dataclasses
import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.config import rules
from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.rules.model import ATTENTION
from megatron_dsa.config.rules.table import Must, Not
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.layout.sharding import CP_LAYOUTS
from megatron_dsa.training.flag_rules import ROWS
from tests.cases.released_models import CONFIGS
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start

#: transformer-engine's FP8 requires multiples of the weight's height.
FP8 = {"fp8": "hybrid", "transformer_impl": "transformer_engine"}
FP8_INDEXER = FP8 | {"options": DSAOptions(fp8_indexer=True), "dsa_indexer_n_heads": 8}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_is_taken(recipe):
    for parameters in (False, True):
        small_config(**FP8, fp8_recipe=recipe, fp8_param=parameters, dsa_indexer_n_heads=3)
        small_config(**FP8_INDEXER, fp8_recipe=recipe, fp8_param=parameters)


def of_heads(share, **options):
    options = {"indexer_loss_queries": 0.5, "indexer_loss_heads": share} | options
    return {"options": DSAOptions(**options)}


def test_supported_configuration_passes():
    assert small_config().dsa.stage == "sparse"


@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
@pytest.mark.parametrize("stage", ["dense", "warmup", "sparse"])
def test_every_stage_takes_every_layout(stage, cp_layout):
    options = DSAOptions(stage=stage, cp_layout=cp_layout, indexer_loss_queries=1.0)
    changes = {"dsa_indexer_use_sparse_loss": False} if stage == "warmup" else {}
    assert small_config(context_parallel_size=2, options=options, **changes).dsa == options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": 2, "cp_comm_type": "a2a"}, "--cp-comm-type must be p2p"),
        (
            {
                "context_parallel_size": 2,
                "mtp_num_layers": 1,
                "options": DSAOptions(cp_layout="contiguous"),
            },
            "--dsa-cp-layout must not be contiguous with --mtp-num-layers",
        ),
        ({"tensor_model_parallel_size": 2}, "--sequence-parallel is required"),
        (
            of_heads(0.5, indexer_teacher="served") | {"dsa_indexer_topk_freq": 2},
            "--dsa-indexer-loss-heads must be 1 with --dsa-indexer-teacher served",
        ),
        (
            {
                "options": DSAOptions(indexer_teacher="served", indexer_loss_queries=0.5),
                "dsa_indexer_topk_freq": 2, "cuda_graph_impl": "full_iteration",
                "recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            "--cuda-graph-impl must not be full_iteration with --dsa-indexer-teacher served, a",
        ),
        (of_heads(0.3), "--dsa-indexer-loss-heads must be 1 or 1/2, 1/4, ..., 1/64, got 0.3"),
        (of_heads(0.5, indexer_loss_queries=1.0), "below 1 needs --dsa-indexer-loss-queries below"),
        (of_heads(1 / 8), r"must divide --num-attention-heads \(4\), got 8"),
        (
            of_heads(0.5) | {"tensor_model_parallel_size": 4, "sequence_parallel": True},
            r"must be a multiple of --tensor-model-parallel-size \(4\), got 2",
        ),
        (
            of_heads(0.5)
            | {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "dsa_indexer_use_sparse_loss": False,
            },
            "--dsa-indexer-loss-heads must be 1 with a loss over all visible keys",
        ),
        ({"attention_dropout": 0.1}, "--attention-dropout must be 0"),
        ({"qk_layernorm": False}, "--qk-layernorm is required"),
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk is required in"),
        ({"dsa_indexer_n_heads": None}, "--dsa-indexer-n-heads is required in"),
        ({"dsa_indexer_head_dim": 4}, "--dsa-indexer-head-dim .4. must be at least"),
        ({"dsa_indexer_head_dim": 24}, "power of two"),
        ({"q_lora_rank": None}, "--q-lora-rank is required with --qk-layernorm"),
        (
            {
                "q_lora_rank": None,
                "qk_layernorm": False,
                "options": DSAOptions("dense", latent_norm_epsilon=1e-6),
            },
            "--dsa-latent-norm-epsilon needs --qk-layernorm",
        ),
        (
            {"fp32_residual_connection": True, "params_dtype": torch.bfloat16},
            "--fp32-residual-connection is not supported",
        ),
        (
            {
                "fp32_residual_connection": True,
                "params_dtype": torch.bfloat16,
                "transformer_impl": "transformer_engine",
            },
            "--fp32-residual-connection is not supported",
        ),
        ({"fp8": "hybrid"}, "--fp8-format must be unset with --transformer-impl local"),
        (
            {"options": DSAOptions(fp8_indexer=True), "dsa_indexer_n_heads": 8},
            "--fp8-format is required with --dsa-fp8-indexer",
        ),
        (
            FP8_INDEXER | {"dsa_indexer_n_heads": 12},
            "--dsa-indexer-n-heads must be a multiple of 8 with --dsa-fp8-indexer, got 12",
        ),
        (
            FP8_INDEXER | {"fp8_recipe": "mxfp8"},
            "--dsa-indexer-n-heads must be a multiple of 32 with --dsa-fp8-indexer, got 8",
        ),
        ({"rope_type": "yarn", "rotary_percent": 0.5}, "--rotary-percent must be 1"),
        ({"use_mup": True, "mup_base_hidden_size": 16}, "--use-mup"),
        ({"num_query_groups": 2}, "--num-query-groups must be unset or 4, got 2"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
            "--offload-modules must not name core_attn",
        ),
        ({"dsa_indexer_loss_coeff": None}, "--dsa-indexer-loss-coeff is required in --dsa-s"),
        ({"dsa_indexer_loss_coeff": -0.5}, "--dsa-indexer-loss-coeff must be finite .*got -0.5"),
        ({"dsa_indexer_loss_coeff": float("nan")}, "--dsa-indexer-loss-coeff must be .*got nan"),
        (
            {"dsa_indexer_loss_coeff": -0.5, "options": DSAOptions(stage="warmup")},
            "--dsa-indexer-loss-coeff must be finite .*got -0.5",
        ),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "q_lora_rank": 25},
            "--q-lora-rank .25. must be a multiple of --tensor-model-parallel-size .2.",
        ),
        ({"qk_head_dim": 13}, "--qk-head-dim must be even, got 13"),
        ({"qk_head_dim": 0}, "--qk-head-dim must be finite and at least 1 .*got 0"),
        ({"qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim must be even"),
        ({"qk_pos_emb_head_dim": -2}, "--qk-pos-emb-head-dim must be finite and at least 0"),
        ({"q_lora_rank": 0}, "--q-lora-rank must be finite and at least 1"),
        ({"kv_lora_rank": -1}, "--kv-lora-rank must be finite and at least 1"),
        ({"v_head_dim": 0}, "--v-head-dim must be finite and at least 1"),
        ({"rotary_base": 0}, "--rotary-base must be finite and above 0"),
        ({"rotary_scaling_factor": float("nan")}, "--rotary-scaling-factor must be finite"),
        ({"rotary_percent": 1.5}, "--rotary-percent must be finite and above 0 and at most 1"),
        (
            {"dsa_indexer_head_dim": 17, "dsa_indexer_rotate_activation": False},
            "--dsa-indexer-head-dim must be even, got 17",
        ),
        (
            {
                "mtp_num_layers": 1,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
            "--recompute-num-layers must be 1 with --mtp-num-layers",
        ),
    ],
)  # fmt: skip
def test_unsupported_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(**changes)


def test_a_share_of_the_heads_is_not_for_v4():
    with pytest.raises(ConfigError, match="must be 1 with --csa-compress-ratios"):
        small_csa_config(4, **of_heads(0.5))


def all_rows():
    """Return all rules of the tables."""
    found = []
    for each in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        for value in vars(importlib.import_module(each.name)).values():
            rows = [value] if isinstance(value, Must) else value if type(value) is tuple else ()
            found += [row for row in rows if isinstance(row, Must)]
    return found + [row for row, _, _ in ROWS]


#: Fields of all rules, so that a lost one is noticed.
NAMES = """
add_bias_linear add_qkv_bias attention_dropout batch_invariant_mode bf16 cache_mla_latents
calculate_per_token_loss context_parallel_size context_parallel_size cpu_offloading
csa_compress_ratios csa_compress_ratios csa_compress_ratios csa_compress_ratios csa_compress_ratios
csa_compress_ratios csa_compress_ratios cuda_graph_impl cuda_graph_impl cuda_graph_impl
cuda_graph_impl cuda_graph_impl cuda_graph_impl cuda_graph_impl cuda_graph_impl
dataloader_inter_document_masking delay_wgrad_compute delay_wgrad_compute dsa_dry_run
dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved
dsa_indexer_rotate_activation dsa_indexer_topk_freq dsa_indexer_topk_freq
dsa_indexer_use_sparse_loss dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_time_operations
eod_mask_loss evaluate_indexer experimental_attention_variant fine_grained_activation_offloading
fine_grained_activation_offloading fp16 fp4 fp4 fp4 fp4_param fp8 fp8 fp8 fp8_dot_product_attention
fp8_multi_head_attention fp8_param fp8_param_gather gtp_weight_remat_size hc_mult hc_mult
hybrid_context_parallel hybrid_layer_pattern hybrid_layer_pattern indexer_loss_heads
indexer_numerics indexer_pool_size is_hybrid_model latent_norm_epsilon layernorm_zero_centered_gamma
layernorm_zero_centered_gamma layernorm_zero_centered_gamma log_max_attention_logit lora_alpha
lora_rank lora_rank lora_rank lora_targets mla_down_proj_fusion mlp_chunks_for_training mock_data
moe_enable_routing_replay moe_hash_layers moe_hash_layers moe_router_load_balancing_type mscale
mscale_all_dim multi_latent_attention no_rope_freq normalization normalization output_gate
overlap_moe_expert_parallel_comm overlap_moe_expert_parallel_comm overlap_moe_expert_parallel_comm
overlap_moe_expert_parallel_comm q_lora_rank qk_clip qk_l2_norm qk_layernorm qk_pos_emb_head_dim
quant_recipe quant_recipe recompute recompute reset_attention_mask reset_position_ids rope_type
rotary_percent rotary_seq_len_interpolation_factor save selected_attention
sft_tokenizer_prompt_format softmax_scale softmax_type stage te_rng_tracker timing_log_level
tokenizer_type tp_mode use_distributed_optimizer use_kitchen use_kitchen_attention
use_layer_wise_distributed_optimizer use_megatron_fsdp use_rope_scaling use_torch_fsdp2
use_transformer_engine_op_fuser window_attn_skip_freq window_size
"""


def test_no_row_is_lost():
    assert sorted(row.name for row in all_rows()) == NAMES.split()


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_every_row_of_the_rules(row):
    right, wrong = row.values, "wrong"
    if isinstance(row.values, Not):
        right, wrong = "right", row.values[0]
    elif isinstance(row.values, tuple):
        right = row.values[0]
    elif isinstance(row.values, bool):
        wrong = not row.values
    assert row.check(SimpleNamespace(), SimpleNamespace(**{row.name: right}))[0]
    assert row.check(SimpleNamespace())[0]
    ok, message = row.check(SimpleNamespace(**{row.name: wrong}), case="with it")
    assert not ok and message.startswith(row.flag or flag_of(row.name))
    assert "with it" in message and row.why in message
    assert isinstance(row.values, bool) or str(wrong) in message


def test_rows_of_attention_hold_for_a_usual_model():
    config = small_config()
    assert len(ATTENTION) > 25 and all(row.check(config)[0] for row in ATTENTION)


def test_options_may_come_from_a_file_without_tuples():
    """Policies are keys of caches, so their names must be hashable."""
    options = DSAOptions(named=[["indexer_topk", "torch"]])
    assert options == DSAOptions(named=(("indexer_topk", "torch"),))
    assert hash(options.policy) == hash(DSAOptions(named=(("indexer_topk", "torch"),)).policy)


@pytest.mark.parametrize("name", ["cp_layout", "tp_mode", "csa_teacher", "stage"])
def test_unknown_choices_are_named(name):
    with pytest.raises(ConfigError, match=f"--dsa-{name.replace('_', '-')} must be one of"):
        DSAOptions(**{name: "both"})


def test_the_dense_stage_needs_no_loss_coefficient():
    options = DSAOptions(stage="dense")
    assert small_config(dsa_indexer_loss_coeff=None, options=options).dsa.stage == "dense"


def test_flags_that_messages_name_exist():
    import argparse
    import re
    from pathlib import Path

    from megatron.training.arguments import add_megatron_arguments

    from megatron_dsa.arguments import add_dsa_arguments

    parser = add_dsa_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    files = Path(rules.__file__).parent.glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"--[a-z][a-z0-9-]+[a-z0-9]", source))
    named |= {flag_of(row.name) for row in all_rows() if not row.flag}
    # Kitchen's flags exist only with that package.
    unknown = {flag for flag in named - set(parser._option_string_actions) if "kitchen" not in flag}
    assert unknown == set()
    assert len(named) > 40


def test_whole_pools_are_selected():
    from megatron_dsa.config.model import DSAOptions

    with pytest.raises(ConfigError, match=r"must divide --dsa-indexer-topk \(12\), got 5"):
        small_config(
            options=DSAOptions(indexer_pool_size=5), qk_pos_emb_head_dim=0,
            dsa_indexer_rotate_activation=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_type": "off-by-one"}, "--softmax-type must be vanilla or learnable, got off-by"),
        ({"options": DSAOptions(stage="dense")}, "--dsa-stage must be sparse with --softmax-type"),
        (
            {"dsa_indexer_use_sparse_loss": False},
            "--dsa-indexer-use-sparse-loss is required with --softmax-type learnable",
        ),
    ],
)
def test_where_layers_have_no_sinks(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(**{"softmax_type": "learnable"} | changes)


def test_v4_takes_neither_sinks_nor_a_gate():
    for changes in ({"softmax_type": "learnable"}, {"options": DSAOptions(output_gate=True)}):
        with pytest.raises(ConfigError, match="--csa-compress-ratios must be unset with --"):
            small_csa_config(4, **changes)


def test_warmup_needs_a_loss():
    from megatron_dsa.config.model import DSAOptions

    with pytest.raises(ConfigError, match="--dsa-indexer-loss-coeff is required in --dsa-stage"):
        small_config(dsa_indexer_loss_coeff=None, options=DSAOptions(stage="warmup"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "spares"}, "--dsa-stage must be one of"),
        ({"workspace_bytes": 10}, "--dsa-workspace-mib must be finite and at least 1"),
        ({"health_tokens": -1}, "--dsa-health-tokens"),
        ({"latent_norm_epsilon": 0.0}, "--dsa-latent-norm-epsilon must be finite and above 0"),
    ],
)
def test_bad_options_are_named(changes, message):
    start()
    from megatron_dsa.config.model import DSAOptions

    with pytest.raises(ConfigError, match=message):
        DSAOptions(**changes)


def test_a_layer_validates_a_foreign_configuration():
    config = small_config()
    config.attention_dropout = 0.5
    with pytest.raises(ConfigError, match="--attention-dropout"):
        attention_module(config)


def test_strict_policy_refuses_at_construction():
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.errors import FallbackError

    config = small_config(options=DSAOptions(strict=True))
    with pytest.raises(FallbackError, match="--dsa-strict refuses"):
        attention_module(config)


@pytest.mark.parametrize(
    "argument",
    ["inference_context", "key_value_states", "attention_bias", "rotary_pos_emb"]
    + ["rotary_pos_cos", "sequence_len_offset", "position_ids"],
)
def test_unsupported_calls_are_named(argument):
    module = attention_module(small_config())
    x = hidden_like(module, 4)
    with pytest.raises(ConfigError, match=f"{argument} must be None"):
        module(x, None, **{argument: torch.zeros(1)})


def test_non_causal_masks_are_refused():
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_dsa.layers.dsa_core import DSACoreAttention, DSACoreAttentionSubmodules

    with pytest.raises(ConfigError, match="attn_mask_type must be causal"):
        DSACoreAttention(small_config(), DSACoreAttentionSubmodules(), 1, AttnMaskType.no_mask)


def test_frozen_indexer_without_a_loss():
    """An indexer without a loss has no gradient to wait for."""
    module = attention_module(small_config(dsa_indexer_loss_coeff=0.0))
    flags = {p.requires_grad for p in module.core_attention.indexer.parameters()}
    assert flags == {False}
    module(hidden_like(module, 32), None)[0].sum().backward()


def test_from_mla_takes_the_fields_over():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import DSATransformerConfig

    ours = small_config(num_layers=3)
    fields = {f.name: getattr(ours, f.name) for f in dataclasses.fields(MLATransformerConfig)}
    plain = MLATransformerConfig.__new__(MLATransformerConfig)
    plain.__dict__.update(fields)
    upgraded = DSATransformerConfig.from_mla(plain, DSAOptions(stage="dense"))
    assert upgraded.num_layers == 3 and upgraded.dsa.stage == "dense"


@pytest.mark.parametrize("name", ["v3.2", "glm-5"])
def test_presets(name):
    start()
    from megatron_dsa.config.presets import preset

    config = preset(name, num_layers=2, transformer_impl="local", dsa_indexer_loss_coeff=1.0)
    assert config.num_layers == 2
    assert config.kv_lora_rank + config.qk_pos_emb_head_dim == 576
    assert config.dsa_indexer_topk == 2048
    with pytest.raises(ConfigError, match="no such configuration field: layers"):
        preset(name, layers=2)
    with pytest.raises(ConfigError, match="unknown model"):
        preset("v3")


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_models_are_the_released_ones(name):
    start()
    from megatron_dsa.config.presets import VOCABULARY, model_preset
    from megatron_dsa.extras.huggingface.config_json import check_model, parse_config

    released = CONFIGS[name]
    config = model_preset(name, dsa_indexer_loss_coeff=1.0)
    check_model(parse_config(released), config)
    text = released.get("text_config", released)
    assert config.mtp_num_layers == text["num_nextn_predict_layers"]
    assert VOCABULARY[name] == text["vocab_size"]
    wrong = {"moe_router_topk_scaling_factor": 2.0}
    with pytest.raises(ConfigError, match=r"moe_router_topk_scaling_factor is 2\.0"):
        check_model(parse_config(released), model_preset(name, dsa_indexer_loss_coeff=1.0, **wrong))


def test_options_of_a_whole_model_keep_its_epsilon():
    start()
    from megatron_dsa.config.presets import model_preset

    kept = model_preset("glm-5", dsa_indexer_loss_coeff=1.0, dsa=DSAOptions(fused=False)).dsa
    assert (kept.fused, kept.latent_norm_epsilon) == (False, 1e-6)
    other = DSAOptions(latent_norm_epsilon=1e-3)
    assert model_preset("glm-5", dsa_indexer_loss_coeff=1.0, dsa=other).dsa == other


def test_which_layers_compute_their_selection():
    start()
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        is_dsa_skip_topk_layer,
    )

    from megatron_dsa.config.model import computes_topk

    for freq in (1, 2, 3):
        for offset in (0, 1, 2, 3):
            config = small_config(dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)
            for layer in range(1, 9):
                # The flags keep Megatron's meaning.
                skips = is_dsa_skip_topk_layer(layer, offset, freq)
                assert computes_topk(config, layer) == (not skips), (freq, offset, layer)
