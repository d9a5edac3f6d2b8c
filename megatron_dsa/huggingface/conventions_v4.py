"""Conventions of DeepSeek-V4: its ``config.json`` in Megatron's terms, or refused.

Read in both forms: as released (``compress_ratios``, ``rope_scaling``) and as ``transformers``
writes it (``layer_types`` with ``compress_rates``, ``rope_parameters`` by kind of layer).
"""

from __future__ import annotations

from typing import Any

from megatron_dsa.config_rules import CSA_RATIO
from megatron_dsa.huggingface.config_json import (
    ROPE_KEYS,
    HFModel,
    check_indexer_keys,
    check_only,
    expert_fields,
    indexer_fields,
    model_of,
    required,
    rope_type,
    yarn_fields,
)
from megatron_dsa.huggingface.config_values import COUNT, refuse
from megatron_dsa.huggingface.names_v4 import V4

V4_TYPE = "deepseek_v4"

_SAME = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "head_dim": "v_head_dim",
    "sliding_window": "csa_window_size",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "rms_norm_eps": "layernorm_epsilon",
    "scoring_func": "moe_router_score_function",
}
_ONLY = {
    "num_key_value_heads": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
#: Names of layers by what they are made of, and the ratio that goes with the name.
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": 128,
}
#: Beginnings of keys that later models of the family have, and that change what weights mean.
_FOREIGN = ("candidate_", "kv_source", "compress_")
_KNOWN = {"compress_ratios", "compress_rates", "compress_rope_theta"}


def parse_v4(config: dict[str, Any]) -> HFModel:
    """Return what the config.json of a DeepSeek-V4 means. Errors name its key, rule and fix."""
    check_only(config, _ONLY)
    check_indexer_keys(config)
    for key in config:
        if key.startswith(_FOREIGN) and key not in _KNOWN:
            refuse(key, config[key], "not understood; DeepSeek-V4's layers do not have it")
    ratios = _ratios(config)
    fields = {field: required(config, key) for key, field in _SAME.items()}
    fields |= _rope(config) | _experts(config)
    rotated = _rotated_dims(config)
    fields |= {
        "csa_compress_ratios": ratios,
        "qk_pos_emb_head_dim": rotated,
        "qk_head_dim": config["head_dim"] - rotated,
    }
    if CSA_RATIO in ratios:
        fields |= indexer_fields(config, rope_interleaved=True)
    return model_of(config, fields, V4)


def _ratios(config: dict) -> list[int]:
    """Return the compression ratio of every layer, multi-token prediction last."""
    layers = required(config, "num_hidden_layers")
    total = layers + (config.get("num_nextn_predict_layers") or 0)
    rates = _LAYER_TYPES | (config.get("compress_rates") or {})
    if rates["compressed_sparse_attention"] != CSA_RATIO:
        refuse("compress_rates", config["compress_rates"], f"CSA's rate must be {CSA_RATIO}")
    types = config.get("layer_types")
    if unknown := [kind for kind in types or () if kind not in tuple(rates)]:
        refuse("layer_types", unknown[0], f"must be among {', '.join(_LAYER_TYPES)}")
    if types is None:
        ratios = list(required(config, "compress_ratios"))
    else:
        ratios = [rates[kind] for kind in types]
    if len(ratios) == layers:
        ratios += [0] * (total - layers)
    if len(ratios) < total or not all(COUNT.allows(ratio) and ratio != 1 for ratio in ratios):
        refuse(
            "compress_ratios" if types is None else "layer_types",
            config.get("compress_ratios") if types is None else types,
            f"must give {layers} layers 0 (window), {CSA_RATIO} (CSA) or more (HCA)",
        )
    return ratios[:total]


def _rotated_dims(config: dict) -> int:
    dims, head = config.get("qk_rope_head_dim"), config["head_dim"]
    if dims is None:
        dims = int(head * required(config, "partial_rotary_factor"))
    factor = config.get("partial_rotary_factor")
    if factor is not None and int(head * factor) != dims:
        refuse("partial_rotary_factor", factor, f"contradicts qk_rope_head_dim = {dims}")
    return dims


def _rope(config: dict) -> dict[str, Any]:
    """Bases of both kinds of layers; YaRN is for those with compression."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "compress" in rope:
        plain, compressed = rope.get("main") or {}, rope["compress"]
        rope_type(plain, {"default": ROPE_KEYS["default"]}, "rope_parameters.main")
        base = plain.get("rope_theta") or required(config, "rope_theta")
        compressed_base = compressed.get("rope_theta") or required(config, "compress_rope_theta")
        where = "rope_parameters.compress"
    else:
        compressed, where = rope, "rope_scaling"
        base = required(config, "rope_theta")
        compressed_base = required(config, "compress_rope_theta")
    fields = {"rotary_base": base, "csa_compress_rotary_base": compressed_base}
    keys = ROPE_KEYS | {"yarn": ROPE_KEYS["yarn"] | {"attention_factor"}}
    if rope_type(compressed, keys, where) == "default":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    factor = compressed.get("attention_factor", 1.0)
    if factor != 1.0:
        refuse(f"{where}.attention_factor", factor, "only 1.0 is supported")
    return fields | yarn_fields(compressed, where)


def _experts(config: dict) -> dict[str, Any]:
    score, limit = config["scoring_func"], config.get("swiglu_limit") or None
    if score not in ("sqrtsoftplus", "sigmoid"):
        refuse("scoring_func", score, "must be sqrtsoftplus or sigmoid")
    fields = expert_fields(config, [1] * config["num_hidden_layers"]) | {
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "activation_func_clamp_value": limit,
    }
    if limit is not None:
        # Megatron's fused SwiGLU leaves out the clamp without a word.
        fields["bias_activation_fusion"] = False
    return fields
