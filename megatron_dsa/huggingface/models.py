"""The table of models: how the ``config.json`` of each is read, and the names of its tensors.

Weights fit under any rope convention, and a wrong one shows only as a worse model. So every key
that changes what a weight means is read here, and a value that is not understood is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron_dsa.config import computes_topk
from megatron_dsa.config_rules import CSA_RATIO
from megatron_dsa.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, V3, V4, Names
from megatron_dsa.huggingface.rules import COUNT, check_indexer_keys, refuse, required

Fields = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model type. Fields are arguments of Megatron's transformer configuration.

    Attributes:
        architecture: class of ``transformers``, which Megatron-Bridge asks for.
        names: names of the tensors.
        fields: required key -> field of the same meaning.
        only: optional key -> the only value that Megatron's layers implement.
        converters: called in order with config.json; they return further fields, or raise.
        latent_norm_epsilon: epsilon of the norms of latents, if it is not ``rms_norm_eps``.
        remarks: optional key -> where Megatron's layers differ a little if it is set.
    """

    architecture: str
    names: Names
    fields: dict[str, str]
    only: dict[str, Any]
    converters: tuple[Callable[[dict], Fields], ...]
    latent_norm_epsilon: float | None = None
    remarks: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------------- every model

_INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
_EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
_PLAIN_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}


def _is_yarn(rope: dict, where: str, yarn: set[str] | None) -> bool:
    """Whether rope parameters are YaRN's, or raise for a key or type that is not understood.

    ``yarn`` has the keys of this model's YaRN besides :data:`_YARN_KEYS`; ``None``: no YaRN.
    """
    keys = {"default": _PLAIN_KEYS}
    if yarn is not None:
        keys["yarn"] = _PLAIN_KEYS | _YARN_KEYS | yarn
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(keys):
        refuse(f"{where}.rope_type", kind, f"must be {' or '.join(keys)}")
    for key in sorted(set(rope) - keys[kind]):
        refuse(f"{where}.{key}", rope[key], f"not understood for rope type {kind}")
    return kind == "yarn"


def _yarn(rope: dict, where: str, more: tuple[str, ...] = ()) -> Fields:
    """Return the fields of YaRN but for the base; ``more`` are required and named as fields."""
    for key in ("factor", "original_max_position_embeddings", *more):
        if rope.get(key) is None:
            refuse(f"{where}.{key}", None, "must be given with yarn")
    if rope.get("truncate", True) is not True:
        refuse(f"{where}.truncate", rope["truncate"], "must be true: Megatron rounds YaRN's range")
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    if fast <= slow:
        refuse(f"{where}.beta_fast", fast, f"must be larger than beta_slow ({slow})")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": fast,
        "beta_slow": slow,
        **{key: rope[key] for key in more},
    }


def _indexer(config: dict, rope_interleaved: bool) -> Fields:
    """Return the fields of an indexer, whose rope pairs neighbouring dims or halves."""
    return {ours: required(config, key) for key, ours in _INDEXER.items()} | {
        "dsa_indexer_rope_interleaved": rope_interleaved,
        "dsa_indexer_scoring_relu": True,
    }


def _experts(config: dict, pattern: list[int]) -> Fields:
    """Return the fields of experts; ``pattern`` has 1 for a layer with experts, 0 for another."""
    fields = {ours: required(config, key) for key, ours in _EXPERTS.items()}
    chosen = fields["moe_router_topk"]
    if chosen < 2:
        refuse("num_experts_per_tok", chosen, "must be 2 or more: Megatron does not normalise one")
    shared = config.get("n_shared_experts") or 0
    return fields | {
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


# ------------------------------------------------------------ DeepSeek-V3, DeepSeek-V3.2, GLM-5

#: Epsilon of the norms of latents and of the indexer's keys; config.json does not say it.
_LATENT_NORM_EPSILON = 1e-6
_MSCALES = ("mscale", "mscale_all_dim")


def _mla(config: dict) -> Fields:
    """Return the fields of rope, which pairs neighbouring dims on both sides."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    if key_heads != heads:
        rule = f"must be num_attention_heads ({heads}): multi-latent attention shares no heads"
        refuse("num_key_value_heads", key_heads, rule)
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(where) or {}
    is_yarn = _is_yarn(rope, where, set(_MSCALES))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"{where}.partial_rotary_factor",
            rope["partial_rotary_factor"],
            "must be 1: qk_rope_head_dim says which dims rotate",
        )
    base = rope.get("rope_theta") or required(config, "rope_theta")
    if is_yarn:
        return {"rotary_base": base, **_yarn(rope, where, _MSCALES)}
    # The scaling factor enters Megatron's softmax scale whatever the type of rope is.
    return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}


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
    fields = _experts(config, [int(kind == "sparse") for kind in pattern])
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
    """``interleaved``: the rope pairs neighbouring dims, unless config.json says otherwise."""
    known = {"indexer_rope_interleave", "index_share_for_mtp_iteration", *_INDEXER}
    check_indexer_keys(config, known.union(_SHARING))
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        refuse("indexer_rope_interleave", said, "must be true or false")
    return {
        **_indexer(config, interleaved if said is None else said),
        "dsa_indexer_k_norm_epsilon": _LATENT_NORM_EPSILON,
        **_index_sharing(config),
    }


#: Keys of index sharing: a list of layers, or frequency and offset.
_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def _index_sharing(config: dict) -> Fields:
    """Which layers have an indexer: GLM lists them, Megatron has a frequency and an offset."""

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
    converters=(_mla, _grouped_experts),
    latent_norm_epsilon=_LATENT_NORM_EPSILON,
    remarks={
        "index_share_for_mtp_iteration": "index_share_for_mtp_iteration has no counterpart: layers "
        "of multi-token prediction select by themselves"
    },
)


def _with_indexer(architecture: str, interleaved: bool) -> Model:
    """Return DeepSeek-V3 with indexers, whose rope pairs neighbouring dims or halves."""
    indexer: Callable[[dict], Fields] = partial(_dsa_indexer, interleaved=interleaved)
    converters = (*_DEEPSEEK_V3.converters, indexer)
    return dataclasses.replace(_DEEPSEEK_V3, architecture=architecture, converters=converters)


# ----------------------------------------------------------------------------------- DeepSeek-V4
# Read in both forms: as released (compress_ratios, rope_scaling) and as transformers writes it
# (layer_types with compress_rates, rope_parameters by kind of layer).

#: Field of the transformer configuration that counts the leading layers with hash routing.
HASH_LAYERS = "moe_hash_layers"
#: Features that a model may be built without -> the fields that describe them.
FEATURE_FIELDS = {
    HYPER_CONNECTIONS: ("hc_mult", "hc_eps", "hc_sinkhorn_iters"),
    HASH_ROUTING: (HASH_LAYERS,),
}

#: Names of layers by their attention, and the ratio that goes with the name.
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": 128,
}


def _check_v4_keys(config: dict) -> None:
    """Raise for keys that later models of the family have, and that change what weights mean."""
    check_indexer_keys(config, _INDEXER)
    known = ("compress_ratios", "compress_rates", "compress_rope_theta")
    for key in config:
        if key.startswith(("candidate_", "kv_source", "compress_")) and key not in known:
            refuse(key, config[key], "not understood; DeepSeek-V4's layers do not have it")


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
    key = "compress_ratios" if types is None else "layer_types"
    listed = required(config, key)
    ratios = list(listed) if types is None else [rates[kind] for kind in types]
    if len(ratios) == layers:
        ratios += [0] * (total - layers)
    if len(ratios) < total or not all(COUNT.allows(ratio) and ratio != 1 for ratio in ratios):
        rule = f"must give {layers} layers 0 (window), {CSA_RATIO} (CSA) or more (HCA)"
        refuse(key, listed, rule)
    return ratios[:total]


def _v4_rope(config: dict) -> Fields:
    """Bases of both kinds of layers; YaRN is for those with compression."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    where, base, compressed_base = "rope_scaling", None, None
    if "compress" in rope:
        plain, rope, where = rope.get("main") or {}, rope["compress"], "rope_parameters.compress"
        if rope is None:
            refuse(where, rope, "must be a JSON object")
        _is_yarn(plain, "rope_parameters.main", None)
        base, compressed_base = plain.get("rope_theta"), rope.get("rope_theta")
    fields = {
        "rotary_base": base or required(config, "rope_theta"),
        "csa_compress_rotary_base": compressed_base or required(config, "compress_rope_theta"),
    }
    if not _is_yarn(rope, where, {"attention_factor"}):
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    factor = rope.get("attention_factor", 1.0)
    if factor != 1.0:
        refuse(f"{where}.attention_factor", factor, "only 1.0 is supported")
    return fields | _yarn(rope, where)


def _v4_experts(config: dict) -> Fields:
    score, limit = config["scoring_func"], config.get("swiglu_limit") or None
    if score not in ("sqrtsoftplus", "sigmoid"):
        refuse("scoring_func", score, "must be sqrtsoftplus or sigmoid")
    fields = _experts(config, [1] * config["num_hidden_layers"]) | {
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "activation_func_clamp_value": limit,
    }
    # Megatron's fused SwiGLU leaves out the clamp without a word.
    return fields if limit is None else fields | {"bias_activation_fusion": False}


def _csa(config: dict) -> Fields:
    """Ratios, dims that rotate, and the indexer, if a layer has one."""
    _check_v4_keys(config)
    ratios, head = _ratios(config), config["head_dim"]
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
    return fields | _indexer(config, rope_interleaved=True) if CSA_RATIO in ratios else fields


def _streams(config: dict) -> Fields:
    """Return the fields of hyper-connections; a single stream is a plain residual."""
    streams = config.get("hc_mult") or 1
    if streams == 1:
        return {"hc_mult": 1}
    return {key: required(config, key) for key in ("hc_mult", "hc_eps", "hc_sinkhorn_iters")}


def _hash_layers(config: dict) -> Fields:
    """Return how many leading layers look their experts up by token."""
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
    converters=(_v4_rope, _v4_experts, _csa, _streams, _hash_layers),
)

#: By ``model_type`` of config.json.
MODELS = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _with_indexer("DeepseekV32ForCausalLM", interleaved=False),
    "glm_moe_dsa": _with_indexer("GlmMoeDsaForCausalLM", interleaved=True),
    "deepseek_v4": _DEEPSEEK_V4,
}
