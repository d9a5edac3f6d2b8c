"""DeepSeek-V4: keys of ``config.json``."""

from typing import Any

from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.extras.huggingface.keys import (
    COUNT,
    INDEXER,
    Fields,
    Model,
    expert_fields,
    indexer_fields,
    is_yarn,
    refuse,
    required,
    yarn_fields,
)
from megatron_dsa.extras.huggingface.model_v3 import ALIASES
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, V4

HASH_LAYERS = "moe_hash_layers"
#: Optional feature -> configuration fields.
FEATURE_FIELDS = {
    HYPER_CONNECTIONS: ("hc_mult", "hc_eps", "hc_sinkhorn_iters", "hc_collapse"),
    HASH_ROUTING: (HASH_LAYERS,),
}

#: Layer type -> compression ratio.
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": 128,
}


def layer_ratios(config: dict) -> list[int]:
    """Return each layer's compression ratio; multi-token prediction comes last."""
    layers = required(config, "num_hidden_layers")
    total = layers + (config.get("num_nextn_predict_layers") or 0)
    rates = _LAYER_TYPES | (config.get("compress_rates") or {})
    if rates["compressed_sparse_attention"] != CSA_RATIO:
        refuse("compress_rates", config["compress_rates"], f"CSA's rate must be {CSA_RATIO}")
    types = config.get("layer_types")
    if unknown := [kind for kind in types or () if kind not in tuple(rates)]:
        refuse("layer_types", unknown[0], f"must be among {', '.join(_LAYER_TYPES)}")
    key = "compress_ratios" if types is None else "layer_types"
    listed = required(config, key)
    ratios = list(listed) if types is None else [rates[kind] for kind in types]
    wide = rates["heavily_compressed_attention"]
    if config.get("compress_rates") and types is None and set(ratios) - {0, CSA_RATIO, wide}:
        refuse(key, listed, f"contradicts compress_rates, whose rate of HCA is {wide}: drop one")
    if len(ratios) == layers:
        ratios += [0] * (total - layers)
    if len(ratios) < total or not all(COUNT.allows(ratio) and ratio != 1 for ratio in ratios):
        rule = f"must give {layers} layers 0 (window), {CSA_RATIO} (CSA) or more (HCA)"
        refuse(key, listed, rule)
    return ratios[:total]


def _v4_rope(config: dict) -> Fields:
    """Return both rope bases; YaRN applies only to compressed layers."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope: Any = config.get(where) or {}
    nested, plain = bool({"main", "compress"} & rope.keys()), {}
    if nested:
        for name in ("compress", "main"):
            if not isinstance(rope.get(name), dict):
                refuse(f"{where}.{name}", rope.get(name), "must be a JSON object, as its neighbour")
        plain, rope = rope["main"], rope["compress"]
        is_yarn(plain, f"{where}.main", None)
        where += ".compress"
    compressed_base = rope.get("rope_theta") if nested else None
    fields = {
        "rotary_base": plain.get("rope_theta") or required(config, "rope_theta"),
        "csa_compress_rotary_base": compressed_base or required(config, "compress_rope_theta"),
    }
    if not is_yarn(rope, where, {"attention_factor"}):
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    # In a nested object, transformers derives the attention factor from ``factor``.
    factor = rope.get("attention_factor", None if nested else 1.0)
    if factor != 1.0:
        refuse(f"{where}.attention_factor", factor, "must be given, and only 1.0 is supported")
    return fields | yarn_fields(rope, where)


def _v4_experts(config: dict) -> Fields:
    score = config["scoring_func"]
    if score not in ("sqrtsoftplus", "sigmoid"):
        refuse("scoring_func", score, "must be sqrtsoftplus or sigmoid")
    return expert_fields(config, [1] * config["num_hidden_layers"]) | {
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
    }


def clamp(config: dict) -> Fields:
    limit = config.get("swiglu_limit") or None
    fields = {"activation_func_clamp_value": limit}
    # Megatron's fused SwiGLU silently ignores the clamp.
    return fields if limit is None else fields | {"bias_activation_fusion": False}


def _csa(config: dict) -> Fields:
    ratios, head = layer_ratios(config), config["head_dim"]
    dims, factor = config.get("qk_rope_head_dim"), config.get("partial_rotary_factor")
    if dims is None:
        dims = int(head * required(config, "partial_rotary_factor"))
    if factor is not None and int(head * factor) != dims:
        refuse("partial_rotary_factor", factor, f"contradicts qk_rope_head_dim = {dims}")
    fields = {
        "csa_compress_ratios": ratios,
        "qk_pos_emb_head_dim": dims,
        "qk_head_dim": head - dims,
    }
    return fields | indexer_fields(config, rope_interleaved=True) if CSA_RATIO in ratios else fields


def streams(config: dict) -> Fields:
    streams = config.get("hc_mult") or 1
    if streams == 1:
        return {"hc_mult": 1}
    return {key: required(config, key) for key in ("hc_mult", "hc_eps", "hc_sinkhorn_iters")}


def _hash_layers(config: dict) -> Fields:
    layers, types = config["num_hidden_layers"], config.get("mlp_layer_types")
    if types is None:
        return {HASH_LAYERS: min(config.get("num_hash_layers") or 0, layers)}
    if len(types) != layers or any(kind not in ("hash_moe", "moe") for kind in types):
        refuse("mlp_layer_types", types, "must say hash_moe or moe for every layer")
    count = types.count("hash_moe")
    if types != ["hash_moe"] * count + ["moe"] * (layers - count):
        refuse("mlp_layer_types", types, "must have the layers of hash_moe first")
    return {HASH_LAYERS: count}


DEEPSEEK_V4 = Model(
    architecture="DeepseekV4ForCausalLM",
    names=V4,
    fields={
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
    },
    only={"num_key_value_heads": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    same=(
        ("v_head_dim", "head_dim"),  # keys and values share one head
        ("qk_head_dim", "head_dim"),
        ("head_dim", "qk_nope_head_dim + qk_rope_head_dim"),
    ),
    closed={
        "index": INDEXER,
        "candidate_": (),
        "kv_source": (),
        "compress_": ("compress_ratios", "compress_rates", "compress_rope_theta"),
    },
    aliases=ALIASES | {"intermediate_size": "moe_intermediate_size"},
    converters=(_v4_rope, _v4_experts, clamp, _csa, streams, _hash_layers),
)
