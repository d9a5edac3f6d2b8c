"""Layer patterns of hybrid models: parts, selecting layers, rejected patterns."""

import pytest
import torch

from megatron_dsa.config.hybrid import (
    attention_layers,
    attention_number,
    count_pairs,
    logged_layers,
    parts_of_layer,
)
from megatron_dsa.config.model import DSAOptions, ends_group, selects_keys
from megatron_dsa.errors import ConfigError
from tests.host import small_config, small_hybrid_config

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
SHARED = {"dsa_indexer_topk_freq": 2}
PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float64}


def test_parts_of_a_pattern():
    config = small_hybrid_config("D-|GD/DE/DE", **EXPERTS)
    assert [parts_of_layer(config, number) for number in (1, 2, 3, 4)] == list("D-GD")
    assert parts_of_layer(config, 2, is_mtp=True) == "DE"
    assert attention_layers(config) == [1, 4] and attention_number(config, 4) == 2
    assert logged_layers(config) == 4 + 2 * 2


def test_a_gpt_has_both_parts_in_every_layer():
    config = small_config(num_layers=3, moe_layer_freq=[0, 1, 0], **EXPERTS)
    assert [parts_of_layer(config, number) for number in (1, 2, 3)] == ["D-", "DE", "D-"]
    assert attention_layers(config) == [1, 2, 3] and attention_number(config, 2) == 2
    assert logged_layers(config) == 3


KDA = {"linear_num_key_heads": 32, "linear_num_value_heads": 32}


def test_selections_are_counted_over_sparse_layers():
    """GLM-5.3-Flash's pattern: layers 4, 8, ... are sparse; prediction is, too."""
    config = small_config(num_layers=12, linear_attention_freq=4, dsa_indexer_topk_freq=2, **KDA)
    assert attention_layers(config) == [4, 8, 12] and attention_number(config, 8) == 2
    assert [selects_keys(config, number) for number in (4, 8, 12)] == [True, False, True]
    assert [number for number in (4, 8, 12) if ends_group(config, number)] == [8, 12]
    assert [parts_of_layer(config, number) for number in (3, 4)] == ["K-", "D-"]
    assert parts_of_layer(config, 1, is_mtp=True) == "D-" and config.hetereogenous_dist_checkpoint
    listed = small_config(num_layers=3, linear_attention_freq=[0, 1, 0], **KDA)
    assert attention_layers(listed) == [1, 3] and attention_number(listed, 3) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attention_freq": [1, 0, 1]}, "for each layer, got \\[1, 0, 1\\]"),
        ({"linear_attention_freq": [1, 1]}, "at least one"),
        ({"linear_attention_freq": 3}, "up to --num-layers \\(2\\)"),
        ({"linear_num_key_heads": 16}, "--linear-num-key-heads \\(16\\) must equal"),
        ({"linear_key_head_dim": 64}, "--linear-key-head-dim \\(64\\) must equal"),
        ({"linear_conv_kernel_dim": 0}, "--linear-conv-kernel-dim must be finite and at least 1"),
        ({"kda_gate_lower_bound": 0.0}, "--kda-gate-lower-bound must be finite and at least -5"),
        ({"moe_hash_layers": 1}, "--moe-hash-layers must be 0"),
    ],
)
def test_refused_kda_layers(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(**{"linear_attention_freq": 2} | KDA | changes)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("D-DE", 2), ("D|-D|-", 2), ("D-/D-", 1), ("D-/DE/DE", 1), ("DD--", None), ("D-D", None),
        ("GD-", None), ("D-/D", None), ("-D", None),
    ],
)  # fmt: skip
def test_patterns_of_a_gpt(pattern, count):
    assert count_pairs(pattern) == count


def test_selections_are_counted_over_attention():
    config = small_hybrid_config("D-DED--DD-D-", **SHARED, **EXPERTS)
    numbers = attention_layers(config)
    selecting = [number for number in numbers if selects_keys(config, number)]
    gpt = small_config(num_layers=6, **SHARED)
    expected = [number for number in range(1, 7) if selects_keys(gpt, number)]
    assert selecting == [numbers[number - 1] for number in expected] and len(numbers) > 2
    ends = [number for number in numbers if ends_group(config, number)]
    assert ends == [numbers[i - 1] for i in range(1, 7) if ends_group(gpt, i)]


ZIGZAG = {"context_parallel_size": 2, "options": DSAOptions(cp_layout="contiguous")}
REFUSED = [
    ("--", {}, "must have a layer D"),
    ("D-", {"num_layers": 1}, "--num-layers must be 2 with"),
    ("D-", {"mtp_num_layers": 1}, r"--mtp-num-layers \(1\) must count the parts"),
    ("D-/D-", {"mtp_num_layers": None}, r"--mtp-num-layers \(None\) must count"),
    ("D-DE", {}, "--num-experts is required with layers E"),
    ("D-", EXPERTS, "has a meaning only with them"),
    ("D-DE", EXPERTS | {"moe_layer_freq": [1, 1]}, "--moe-layer-freq must agree"),
    ("MD-", {}, r"must not have M \(Mamba\)"),
    ("D+-", {}, r"must not have \+ \(dense MLA\)"),
    ("GD-", ZIGZAG, "--dsa-cp-layout must be zigzag with layers G"),
    ("D-D-", PIPELINE, r"must have \| between pipeline stages"),
    ("D-|D-", SHARED | PIPELINE, "layer 3 is the first attention"),
    ("D-", {"hc_mult": 2}, "--hc-mult must be 1 with --hybrid-layer-pattern"),
    ("D-", {"options": DSAOptions(lora_rank=2, lora_targets=("o_proj",))}, "--lora-rank must be"),
]


@pytest.mark.parametrize(("pattern", "changes", "message"), REFUSED)
def test_refused(pattern, changes, message):
    with pytest.raises(ConfigError, match=message):
        small_hybrid_config(pattern, **changes)


def test_a_pattern_that_is_not_known_is_asked_for():
    with pytest.raises(ConfigError, match="give it layer_pattern"):
        small_config(is_hybrid_model=True)


def test_accepted():
    small_hybrid_config("D-DE|DE/DE", moe_layer_freq=[0, 1, 1], **EXPERTS)
    small_hybrid_config("D-D-|D-", **SHARED | PIPELINE)
