"""Configuration of hybrid attention: rules, presets, rope tables, fp32 parameters."""

import argparse

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.presets import PRESETS, preset
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.rope import PositionRope
from tests.helpers import relative_error
from tests.host import attention_module, small_csa_config, start

IN_BLOCKS = {"options": DSAOptions(recompute="queries")}
WRONG = {
    "one ratio per layer": {"csa_compress_ratios": [4]},
    "--csa-compress-ratios must be 0 or at least 2": {"csa_compress_ratios": [4, 1]},
    "--csa-window-size must be finite and at least 1": {"csa_window_size": 0},
    "--csa-compress-rotary-base is required": {"csa_compress_rotary_base": None},
    "the key is the value": {"v_head_dim": 24},
    "must divide --num-attention-heads": {"o_groups": 3},
    "must be RMSNorm": {"normalization": "LayerNorm"},
    "V4's indexer pairs neighbouring dims": {"dsa_indexer_rope_interleaved": False},
    "--dsa-indexer-topk is required in": {"dsa_indexer_topk": None},
    "must be a power of two for the Hadamard rotation": {"dsa_indexer_head_dim": 24},
    "--mscale must be 1 with --csa": {"mscale": 0.7},
    "V4's indexer would be computed again in bf16": {
        "options": DSAOptions(fp8_indexer=True), "dsa_indexer_n_heads": 8, "fp8": "hybrid",
        "transformer_impl": "transformer_engine", "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "--dsa-indexer-loss-coeff is required in --dsa-stage": {"dsa_indexer_loss_coeff": None},
    "--dsa-indexer-loss-coeff must be finite and at least 0": {"dsa_indexer_loss_coeff": -1.0},
    "--dsa-recompute must not be latent_output with --csa-compress-ratios": {
        "options": DSAOptions(recompute="latent_output")
    },
    "--cuda-graph-impl must not capture attention with --dsa-recompute queries": IN_BLOCKS
    | {"cuda_graph_impl": "local"},
    "--fp8-format must be unset with --dsa-recompute queries": IN_BLOCKS
    | {"fp8": "hybrid", "transformer_impl": "transformer_engine"},
    "--dsa-recompute must not be queries with an indexer loss over all visible keys": IN_BLOCKS
    | {"dsa_indexer_use_sparse_loss": False},
    "over all visible keys, which reads all queries": {
        "options": DSAOptions(recompute="queries", stage="warmup"),
        "dsa_indexer_use_sparse_loss": False,
    },
    "--dsa-evaluate-indexer is not supported with --dsa-recompute queries": {
        "options": DSAOptions(recompute="queries", evaluate_indexer=True)
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_refusals_name_the_flag(message):
    with pytest.raises(ConfigError, match=message):
        small_csa_config(4, **WRONG[message])


def test_what_only_an_indexer_needs_is_not_asked_of_others():
    nothing = {"dsa_indexer_topk": None, "dsa_indexer_loss_coeff": None}
    small_csa_config(9, dsa_indexer_rope_interleaved=False, **nothing)
    small_csa_config(4, options=DSAOptions(stage="dense"), dsa_indexer_topk=None)


def test_queries_are_computed_again_where_no_loss_reads_them():
    dense_loss = {"dsa_indexer_use_sparse_loss": False}
    small_csa_config(128, **IN_BLOCKS, **dense_loss)
    small_csa_config(4, **IN_BLOCKS, **dense_loss, dsa_indexer_loss_coeff=0.0)


def test_dense_stage_has_no_indexers():
    config = small_csa_config(4, options=DSAOptions(stage="dense"))
    names = dict(attention_module(config).named_parameters())
    assert not any(".indexer." in name for name in names)
    assert any(".compressor." in name for name in names)


def test_yarn_flags_reach_the_configuration():
    """Megatron ignores these flags with --multi-latent-attention."""
    from megatron_dsa.training.flag_rules import apply_yarn_flags

    config = small_csa_config(4, rope_type="yarn", rotary_scaling_factor=16.0)
    args = argparse.Namespace(
        csa_compress_ratios=[4, 4], yarn_original_max_position_embeddings=None,
        yarn_beta_fast=None, yarn_beta_slow=2.0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--yarn-original-max-position-embeddings is required"):
        apply_yarn_flags(args, config)
    args.yarn_original_max_position_embeddings = 65536
    apply_yarn_flags(args, config)
    assert PositionRope.for_ratio(config, 4).yarn == (16.0, 65536, 32, 2.0)


def test_teacher_is_one_of_two():
    with pytest.raises(ConfigError, match="--dsa-csa-teacher must be one of attention, compressed"):
        DSAOptions(csa_teacher="window")


@pytest.mark.parametrize("name", [name for name in PRESETS if "v4" in name])
def test_presets(name):
    start()
    config = preset(name, dsa_indexer_loss_coeff=1.0)
    assert len(config.csa_compress_ratios) == config.num_layers + 1
    assert config.csa_compress_ratios[-1] == 0 and config.ratio(1, is_mtp=True) == 0
    assert config.csa_compress_ratios[2:5] == [4, 128, 4]
    counts = {ratio: config.csa_compress_ratios.count(ratio) for ratio in (0, 4, 128)}
    expected = {"v4-flash": (3, 21, 20), "v4-pro": (1, 30, 31)}
    assert tuple(counts.values()) == expected[name]


def test_rope_tables_are_megatrons():
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    start()
    positions = torch.arange(50)
    yarn = {
        "scaling_factor": 16.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    kinds = {
        "plain": (PositionRope(64, 10000.0), RotaryEmbedding(64, 1.0, use_cpu_initialization=True)),
        "yarn": (
            PositionRope(64, 160000.0, tuple(yarn.values())),
            YarnRotaryEmbedding(64, rotary_base=160000, use_cpu_initialization=True, **yarn),
        ),
    }
    for ours, theirs in kinds.values():
        angles = theirs(50)
        angles = (angles[0] if isinstance(angles, tuple) else angles)[:, 0, 0, :32]
        cos, sin = ours.tables(positions, torch.float64)
        assert relative_error(angles.double().cos(), cos) < 1e-5
        assert relative_error(angles.double().sin(), sin) < 1e-5
    assert (
        kinds["yarn"][0].frequencies("cpu") < PositionRope(64, 160000.0).frequencies("cpu")
    ).any()


def test_sink_and_ape_stay_fp32():
    module = attention_module(small_csa_config(4, dtype=torch.float32))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.bfloat16()
    kept = {name for name, p in module.named_parameters() if p.dtype == torch.float32}
    core = "core_attention"
    assert kept == {
        f"{core}.attn_sink", f"{core}.compressor.ape", f"{core}.indexer.compressor.ape",
    }  # fmt: skip
    for name, parameter in module.named_parameters():
        if name in kept:
            assert parameter.equal(before[name])
    x = torch.randn(40, 1, 32, device=start(), dtype=torch.bfloat16, requires_grad=True)
    module.train()(x, None)[0].sum().backward()
    for name in kept:
        assert dict(module.named_parameters())[name].grad.dtype == torch.float32
    assert module.double().core_attention.attn_sink.dtype == torch.float64
