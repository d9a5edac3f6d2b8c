"""Impossible numbers in config.json: errors name file, key and rule."""

import dataclasses
import json
import math

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.config_json import parse_config, read_config
from megatron_dsa.extras.huggingface.models import MODELS
from tests.tiny_models import YARN, tiny_config, tiny_v4

#: Key of config.json, or of YaRN's object -> impossible values, and the rule.
RANGES = [
    ("rms_norm_eps", (0, -1e-6, 0.3, math.nan, math.inf, "1e-6", True), "> 0 and <= 0.01"),
    ("rope_theta", (0, 1, -1e4, math.nan, math.inf, 10**400, "1e4", True), "finite number > 1"),
    ("routed_scaling_factor", (0, -1, math.nan), "finite number > 0"),
    ("vocab_size", (0, -70, 70.0, "70", True), "whole number >= 1"),
    ("num_hidden_layers", (0, -1, 2.5, "2"), "whole number >= 1"),
    ("num_nextn_predict_layers", (-1, 0.5, "1"), "whole number >= 0"),
    ("index_topk", (0, -6, 6.5, "6"), "whole number >= 1"),
    ("quantization_config", ("fp8", ["fp8"]), "must be a JSON object"),
    ("rope_scaling", ("yarn", [40]), "must be a JSON object"),
    ("mlp_layer_types", ("dense", 2), "must be a JSON list"),
    ("index_topk_pattern", ("FX",), "full (F) or shared (S)"),
    ("dtype", ("int8", "bfloat16", ["float32"]), ""),  # torch_dtype is float32
    ("yarn.factor", (0.5, 0, -40, math.nan, math.inf, "40", True), ">= 1"),
    ("yarn.original_max_position_embeddings", (0, -1, 4096.5, "4096", math.nan), ">= 1"),
    ("yarn.beta_fast", (0, -32, math.nan, "32"), "> 0"),
    ("yarn.beta_fast", (0.5, 1), "must be larger than beta_slow (1)"),
    ("yarn.beta_slow", (0, -1, math.inf), "> 0"),
    ("yarn.mscale", (0, -1, math.nan, "1"), "> 0"),
    ("yarn.mscale_all_dim", (0, -1, math.inf), "> 0"),
    ("yarn.rope_theta", (0, 1, math.nan), "> 1"),
]


@pytest.mark.parametrize(("key", "values", "rule"), RANGES)
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_values_of_no_model_are_refused(where, key, values, rule):
    last = key.removeprefix("yarn.")
    for value in values:
        changes = {key: value} if key == last else {where: YARN | {last: value}}
        with pytest.raises(ConfigError) as error:
            parse_config(tiny_config("glm_moe_dsa", **changes))
        said = str(error.value)
        assert said.startswith(f"config.json: {key.replace('yarn', where)} = ") and rule in said


def test_the_same_keys_with_values_of_models_are_read():
    for changes in ({}, {"rope_scaling": YARN}, {"rope_parameters": YARN}):
        parse_config(tiny_config("glm_moe_dsa", **changes))


PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NESTED = {"main": {"rope_theta": 1e4}, "compress": PLAIN_YARN | {"attention_factor": 1.0}}
#: Model type -> changes of its tiny model, and the message.
REFUSED = {
    "llama": [({}, "model_type = 'llama'")],
    "deepseek_v3": [
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"q_lora_rank": None}, "q_lora_rank = None: it must be given"),
    ],
    "deepseek_v32": [
        ({"kv_lora_rank": None}, "kv_lora_rank = None: it must be given"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"index_window": 3}, "index_window = 3"),
        ({"num_key_value_heads": 2}, r"must be num_attention_heads \(4\)"),
        ({"topk_group": 1}, "topk_group = 1: must be half of num_experts_per_tok"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "scale": 2}},
            "rope_parameters.scale = 2",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'"),
    ],
    "glm_moe_dsa": [
        ({"indexer_rope_interleave": "half"}, "must be true or false"),
        ({"indexer_types": ["shared", "full"]}, "indexer_types"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": PLAIN_YARN},
            "takes rope_scaling and",
        ),
        ({"num_local_experts": 4}, "num_local_experts = 4: contradicts n_routed_experts = 8"),
        ({"num_experts": 4}, "num_experts = 4: contradicts n_routed_experts = 8"),
        ({"head_dim": 24}, "head_dim = 24: contradicts qk_rope_head_dim = 8"),
        ({"qk_head_dim": 24}, "qk_head_dim = 24: contradicts qk_nope_head_dim"),
        (
            {"rope_scaling": PLAIN_YARN, "original_max_position_embeddings": 32},
            "embeddings = 16: contradicts original_max_position_embeddings = 32",
        ),
        (
            {"indexer_types": ["full"] * 79},
            r"'full'\.\.\. \(79 entries\): must have num_hidden_layers \(2",
        ),
        ({"index_topk_pattern": "FS" * 40}, r"FS\.\.\. \(80 entries\): must have num_hidden"),
        ({"mlp_layer_types": ["dense"] * 79}, r"\.\.\. \(79 entries\): must say dense or sparse"),
    ],
    "deepseek_v4": [
        ({"compress_rope_theta": -4e4}, "compress_rope_theta = -40000.0: .* > 1"),
        ({"compress_rope_theta": None}, "compress_rope_theta = None: it must be given"),
        ({"compress_ratios": [0, 4, 8.0, 4]}, "compress_ratios = .*: must give 4 layers"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios = \[0, 4\]: must give 4 layers"),
        ({"compress_ratios": [0, 4, 1, 4]}, "must give 4 layers"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, "CSA's rate must be 4"),
        (
            {"compress_rates": {"heavily_compressed_attention": 16}},
            "compress_ratios = .*: contradicts compress_rates, whose rate of HCA is 16",
        ),
        ({"layer_types": [["sliding_attention"]] * 4}, r"layer_types = \['sliding_attention'\]"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types = 'linear_attention'"),
        ({"swiglu_limit": -1}, "swiglu_limit = -1: .* >= 0"),
        ({"sliding_window": 0}, "sliding_window = 0: .* >= 1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: .* <= 1"),
        ({"partial_rotary_factor": 0.25}, "contradicts qk_rope_head_dim = 8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: only 1 is supported"),
        ({"scoring_func": "softmax"}, "must be sqrtsoftplus or sigmoid"),
        ({"candidate_topk_blocks": 8}, "candidate_topk_blocks = 8: .*not understood"),
        ({"index_source_layer_ids": [2]}, "index_source_layer_ids = .*not understood"),
        ({"hc_eps": None}, "hc_eps = None: it must be given"),
        ({"hc_eps": 1.0}, "hc_eps = 1.0: must be a finite number"),
        ({"hc_sinkhorn_iters": None}, "hc_sinkhorn_iters = None: it must be given"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0: must be a whole number >= 1"),
        ({"mlp_layer_types": ["moe"] * 3}, "must say hash_moe or moe for every layer"),
        ({"mlp_layer_types": ["dense"] * 4}, "must say hash_moe or moe for every layer"),
        (
            {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
            "must have the layers of hash_moe first",
        ),
        ({"v_head_dim": 24}, "v_head_dim = 24: contradicts head_dim = 16"),
        ({"qk_nope_head_dim": 12}, "head_dim = 16: contradicts qk_nope_head_dim . qk_rope_head"),
        (
            {"rope_scaling": None, "rope_parameters": {"compress": None}},
            "rope_parameters.compress = None: must be a JSON",
        ),
        (
            {"rope_parameters": {"compress": {"rope_theta": 4e4}}, "rope_scaling": None},
            "rope_parameters.main = None: must be a JSON object",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "mscale": 1.0}}, "rope_scaling.mscale = 1.0"),
        ({"rope_scaling": {"main": {}}}, "rope_scaling.compress = None: must be a JSON object"),
        (
            {"rope_scaling": {"main": {}, "compress": {}}},
            "compress_rope_theta = 40000.0: transformers takes 10000 there",
        ),
        ({"rope_scaling": NESTED}, "compress_rope_theta = 40000.0: transformers takes 10000 there"),
        (
            {"rope_scaling": {"main": {}, "compress": PLAIN_YARN | {"rope_theta": 4e4}}},
            "rope_scaling.compress.attention_factor = None: must be given",
        ),
        (
            {"expert_dtype": "fp4", "quantization_config": {"expert_dtype": "fp8"}},
            "expert_dtype = 'fp4': contradicts quantization_config.expert_dtype = 'fp8'",
        ),
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_that_are_not_understood_or_contradict_each_other_are_refused(kind):
    for changes, message in REFUSED[kind]:
        v4 = kind == "deepseek_v4"
        with pytest.raises(ConfigError, match=message):
            parse_config(tiny_v4(**changes) if v4 else tiny_config(kind, **changes))


def test_another_model_is_one_entry(monkeypatch):
    like = MODELS["deepseek_v32"]
    entry = dataclasses.replace(
        like,
        architecture="MyModelForCausalLM",
        only={"rope_interleave": True, "scoring_func": "softmax", "my_key": None},
        converters=(*like.converters, lambda _config: {"moe_router_score_function": "softmax"}),
    )
    monkeypatch.setitem(MODELS, "my_model", entry)
    mine = parse_config(tiny_config("my_model", scoring_func="softmax"))
    known = parse_config(tiny_config("deepseek_v32"))
    assert mine.fields == known.fields | {"moe_router_score_function": "softmax"}
    assert mine.names is known.names and mine.has_indexer
    for key in ("scoring_func", "my_key"):
        with pytest.raises(ConfigError, match=f"config.json: {key} = 'sigmoid': only "):
            parse_config(tiny_config("my_model", **{key: "sigmoid"}))


def test_blocks_of_scales_are_positive():
    for block in ([0, 128], [128, -1], ["128", 128], [128.0, 128], [128]):
        quantised = {"quant_method": "fp8", "weight_block_size": block}
        with pytest.raises(ConfigError, match=r"weight_block_size = .* both positive"):
            parse_config(tiny_config(quantization_config=quantised))


def test_errors_name_the_file(tmp_path, capsys):
    other = tmp_path / "other.json"
    for path in (tmp_path / "config.json", other):
        path.write_text(json.dumps(tiny_config(rms_norm_eps=-1e-6)))
        with pytest.raises(ConfigError) as error:
            read_config(path if path == other else tmp_path)
        assert str(error.value).startswith(f"{path}: rms_norm_eps = -1e-06: ")
    with pytest.raises(ConfigError, match=r"other\.json: rms_norm_eps"):
        main(["flags", str(other)])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"model_type": ', "is not valid JSON .*line 1"),
        (b"\xff\xfe{}", "is not valid JSON .*decode"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'["deepseek_v3"]', "holds a list where a JSON object is expected"),
        (b'{"rope_theta": 1e4, "rope_theta": 1e6}', ".*'rope_theta' is given twice"),
    ],
)
def test_broken_json_is_named(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json {message}"):
        read_config(tmp_path)
