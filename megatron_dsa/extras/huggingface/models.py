"""Table of models: keys of ``config.json`` and tensor names.

A misread key loads silently and gives a worse model, so unknown keys are errors.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron_dsa.config.model import computes_topk
from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.extras.huggingface.keys import (
    COUNT,
    EXPERTS,
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
from megatron_dsa.extras.huggingface.names import (
    GLM_5_3,
    HASH_ROUTING,
    HYPER_CONNECTIONS,
    V3,
    V4,
)

_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}

# ------------------------------------------------------------ DeepSeek-V3, DeepSeek-V3.2, GLM-5

#: Norm epsilon of latents and index keys, absent in config.json.
_LATENT_NORM_EPSILON = 1e-6
_MSCALES = ("mscale", "mscale_all_dim")


def _heads(config: dict) -> Fields:
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    if key_heads != heads:
        rule = f"must be num_attention_heads ({heads}): multi-latent attention shares no heads"
        refuse("num_key_value_heads", key_heads, rule)
    return {}


def _mla(config: dict) -> Fields:
    """Return the rope fields; transformers and Megatron both pair neighbouring dims."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(where) or {}
    stretched = is_yarn(rope, where, set(_MSCALES))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"{where}.partial_rotary_factor",
            rope["partial_rotary_factor"],
            "must be 1: qk_rope_head_dim says which dims rotate",
        )
    base = rope.get("rope_theta") or required(config, "rope_theta")
    if stretched:
        return {"rotary_base": base, **yarn_fields(rope, where), **_mscales(rope, where)}
    # Megatron's softmax scale uses this factor for every rope type.
    return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}


def _mscales(rope: dict, where: str) -> Fields:
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_all is None:
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    if scale is None:
        # transformers scales by 0.1 ln(factor) + 1; Megatron divides by mscale_all_dim's scale.
        scale = 1.0 + of_all + 0.1 * of_all * math.log(rope["factor"])
    return {"mscale": scale, "mscale_all_dim": of_all}


def _grouped_experts(config: dict) -> Fields:
    layers, pattern = config["num_hidden_layers"], config.get("mlp_layer_types")
    if pattern is None:
        dense = min(config.get("first_k_dense_replace") or 0, layers)
        experts = config.get("n_routed_experts") is not None
        pattern = ["dense"] * dense + ["sparse" if experts else "dense"] * (layers - dense)
    if len(pattern) != layers or any(kind not in ("dense", "sparse") for kind in pattern):
        refuse("mlp_layer_types", pattern, "must say dense or sparse for every layer")
    if "sparse" not in pattern:
        return {"num_moe_experts": None}
    fields = expert_fields(config, [int(kind == "sparse") for kind in pattern])
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    grouped = groups > 1
    if grouped and fields["moe_router_topk"] != 2 * chosen:
        refuse(
            "topk_group",
            chosen,
            f"must be half of num_experts_per_tok ({fields['moe_router_topk']}): Megatron ranks a "
            "group by its best num_experts_per_tok / topk_group experts, the model by its best two",
        )
    return fields | {
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_router_score_function": "sigmoid",
    }


def _dsa_indexer(config: dict, *, interleaved: bool) -> Fields:
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        refuse("indexer_rope_interleave", said, "must be true or false")
    return {
        **indexer_fields(config, interleaved if said is None else said),
        "dsa_indexer_k_norm_epsilon": _LATENT_NORM_EPSILON,
        **_index_sharing(config),
    }


_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def _index_sharing(config: dict) -> Fields:
    """Convert the list of indexer layers to Megatron's frequency and offset."""

    def rule(freq: int, offset: int) -> Fields:
        return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}

    layers = config["num_hidden_layers"]
    freq, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    key = "indexer_types" if config.get("indexer_types") else "index_topk_pattern"
    listed = config.get(key)
    if listed is None:
        if freq > 1 and not offset:
            refuse("index_skip_topk_offset", offset, "must be 1 or more with index_topk_freq > 1")
        return rule(freq, offset or 0)
    if len(listed) != layers:
        refuse(key, listed, f"must have num_hidden_layers ({layers}) entries")
    if unknown := [kind for kind in listed if kind not in ("full", "F", "shared", "S")]:
        refuse(key, unknown[0], "must say full (F) or shared (S) for every layer")
    full = [kind in ("full", "F") for kind in listed]
    candidates = [rule(freq, offset or 0)] if freq > 1 else []
    candidates += [rule(f, o) for f in range(1, layers + 1) for o in range(layers + 1)]
    for fields in candidates:
        sharing = SimpleNamespace(**fields)
        if full == [computes_topk(sharing, layer + 1) for layer in range(layers)]:
            return fields
    refuse(key, listed, "must be leading full layers, then one full layer in every few")


_DEEPSEEK_V3 = Model(
    architecture="DeepseekV3ForCausalLM",
    names=V3,
    fields={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
        "rms_norm_eps": "layernorm_epsilon",
    },
    only={
        "rope_interleave": True,
        "partial_rotary_factor": 1.0,
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    same=(
        ("head_dim", "qk_rope_head_dim"),
        ("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim"),
    ),
    aliases=_ALIASES,
    converters=(_heads, _mla, _grouped_experts),
    latent_norm_epsilon=_LATENT_NORM_EPSILON,
    remarks={
        "index_share_for_mtp_iteration": "index_share_for_mtp_iteration has no counterpart: layers "
        "of multi-token prediction select by themselves"
    },
)


def _with_indexer(architecture: str, interleaved: bool) -> Model:
    indexer: Callable[[dict], Fields] = partial(_dsa_indexer, interleaved=interleaved)
    converters = (*_DEEPSEEK_V3.converters, indexer)
    known = ("indexer_rope_interleave", "index_share_for_mtp_iteration", *INDEXER, *_SHARING)
    return dataclasses.replace(
        _DEEPSEEK_V3, architecture=architecture, converters=converters, closed={"index": known}
    )


# ----------------------------------------------------------------------------------- DeepSeek-V4

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


def _clamp(config: dict) -> Fields:
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


def _streams(config: dict) -> Fields:
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


_DEEPSEEK_V4 = Model(
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
    aliases=_ALIASES | {"intermediate_size": "moe_intermediate_size"},
    converters=(_v4_rope, _v4_experts, _clamp, _csa, _streams, _hash_layers),
)

# --------------------------------------------------------------------------------- GLM-5.3-Flash

#: Layer type -> 1 for KDA, else 0.
_IS_KDA = {
    "linear_attention": 1,
    "indexed_attention": 0,
    "deepseek_sparse_attention": 0,
    "full_attention": 0,
}
#: Nested KDA keys, which override flat ones.
_KDA = "linear_attn_config"
_KDA_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
#: Defaults in transformers for absent keys.
_GLM_5_3_DEFAULTS = {"first_k_dense_replace": 3, "swiglu_limit": 10.0}


def _clamped_experts(config: dict) -> Fields:
    config = _GLM_5_3_DEFAULTS | {key: x for key, x in config.items() if x is not None}
    return _grouped_experts(config) | _clamp(config)


def _kda(config: dict) -> Fields:
    layers, kinds = config["num_hidden_layers"], required(config, "layer_types")
    if len(kinds) != layers or any(kind not in _IS_KDA for kind in kinds):
        refuse("layer_types", kinds, f"must say {' or '.join(_IS_KDA)} for every layer")
    pattern = [_IS_KDA[kind] for kind in kinds]
    if not any(pattern):
        return {"linear_attention_freq": None}
    given = config.get(_KDA) or {}
    listed = given.get("kda_layers")
    if listed is not None and listed != [i for i, is_kda in enumerate(pattern) if is_kda]:
        refuse(f"{_KDA}.kda_layers", listed, "contradicts layer_types: keep one of them")
    said = {flat: given.get(key, config.get(flat)) for key, flat in _KDA_KEYS.items()}
    bound = said["linear_lower_bound"]
    if bound is None:
        if given.get("safe_gate") is False or not (given or "linear_lower_bound" not in config):
            refuse("linear_lower_bound", None, "only gates with a lower bound are supported")
        bound = -5.0
    heads, dim = required(said, "linear_num_heads"), required(said, "linear_head_dim")
    return {
        "linear_attention_freq": pattern,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": required(said, "linear_conv_kernel_dim"),
        "kda_gate_lower_bound": bound,
    }


def _pooled_indexer(config: dict) -> Fields:
    size, layers = required(config, "index_kpool"), config.get("layer_types") or ()
    kinds, has_kda = config.get("indexer_types"), any(_IS_KDA.get(kind) for kind in layers)
    if has_kda and not kinds:
        for key in ("index_topk_pattern", "index_topk_freq"):
            # Both keys count all layers, but only DSA layers select keys.
            if config.get(key) not in (None, 1):
                refuse(key, config[key], "give indexer_types, with KDA layers")
    if has_kda and kinds and len(kinds) == len(layers):
        selecting = [x for x, kind in zip(kinds, layers, strict=True) if not _IS_KDA.get(kind)]
        if any(kind not in ("full", "F") for kind in selecting):
            refuse("indexer_types", kinds, "no selection is shared across layers of KDA")
        config = {key: x for key, x in config.items() if key not in _SHARING}
    return _dsa_indexer(config, interleaved=True) | {
        POOL_SIZE: size,
        "dsa_indexer_rotate_activation": False,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def _mean_of_streams(config: dict) -> Fields:
    fields = _streams(config)
    return fields if fields["hc_mult"] == 1 else fields | {"hc_collapse": "mean"}


_GLM_5_3_FLASH = dataclasses.replace(
    _DEEPSEEK_V3,
    architecture="Glm5NextForConditionalGeneration",
    names=GLM_5_3,
    only={
        "scoring_func": "sigmoid",
        "qk_rope_head_dim": 0,
        "mla_use_nope": True,
        "mhc": True,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
    },
    closed={
        "index": (
            *("index_kpool", "index_kpool_compress", "index_kpool_always_select_tail"),
            *("indexer_rope_interleave", "index_share_for_mtp_iteration", *INDEXER, *_SHARING),
        ),
        "linear_": (_KDA, *_KDA_KEYS.values()),
    },
    converters=(_heads, _clamped_experts, _kda, _pooled_indexer, _mean_of_streams),
    latent_norm_epsilon=None,
)


#: Models by ``model_type``.
MODELS = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _with_indexer("DeepseekV32ForCausalLM", interleaved=False),
    "glm_moe_dsa": _with_indexer("GlmMoeDsaForCausalLM", interleaved=True),
    "glm5_next": _GLM_5_3_FLASH,
    "deepseek_v4": _DEEPSEEK_V4,
}

#: Field -> its config.json key, if the names differ.
_KEYS = {
    "rotary_base": "rope_theta",
    "csa_compress_rotary_base": "compress_rope_theta",
    "rope_type": "rope_scaling.type",
    "rotary_scaling_factor": "rope_scaling.factor",
    "csa_compress_ratios": "compress_ratios",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "dsa_indexer_topk_freq": "index_topk_freq",
    "dsa_indexer_skip_topk_offset": "index_skip_topk_offset",
    "dsa_indexer_rope_interleaved": "model_type, or indexer_rope_interleave",
    "moe_layer_freq": "first_k_dense_replace, or mlp_layer_types",
    "moe_shared_expert_intermediate_size": "n_shared_experts * moe_intermediate_size",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_score_function": "scoring_func",
    "moe_hash_layers": "num_hash_layers, or mlp_layer_types",
    "activation_func_clamp_value": "swiglu_limit",
    POOL_SIZE: "index_kpool",
    "linear_attention_freq": "layer_types",
}


def key_of(name: str) -> str:
    tables = (_KEYS, *({x: k for k, x in kind.fields.items()} for kind in MODELS.values()))
    shared = {field: key for keys in (INDEXER, EXPERTS) for key, field in keys.items()}
    return next((table[name] for table in (shared, *tables) if name in table), name)
