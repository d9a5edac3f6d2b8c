"""The table of models: how the ``config.json`` of each is read, and the names of its tensors.

Weights fit under any rope convention, and a wrong one shows only as a worse model. So every key
that changes what a weight means is read here, and a value that is not understood is an error.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from megatron_dsa.config.model import computes_topk
from megatron_dsa.extras.huggingface.deepseek_v4 import DEEPSEEK_V4
from megatron_dsa.extras.huggingface.model_keys import (
    EXPERTS,
    INDEXER,
    Fields,
    Model,
    expert_fields,
    indexer_fields,
    is_yarn,
    yarn_fields,
)
from megatron_dsa.extras.huggingface.names import V3
from megatron_dsa.extras.huggingface.rules import check_indexer_keys, refuse, required

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
    # The scaling factor enters Megatron's softmax scale whatever the type of rope is.
    return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}


def _mscales(rope: dict, where: str) -> Fields:
    """Return both factors of YaRN, with the defaults of transformers."""
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_all is None:  # transformers reads mscale only with mscale_all_dim
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    if scale is None:
        # The rope is multiplied by 0.1 * ln(factor) + 1, as without both; Megatron divides by that
        # of mscale_all_dim.
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
    """``interleaved``: the rope pairs neighbouring dims, unless config.json says otherwise."""
    known = {"indexer_rope_interleave", "index_share_for_mtp_iteration", *INDEXER}
    check_indexer_keys(config, known.union(_SHARING))
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        refuse("indexer_rope_interleave", said, "must be true or false")
    return {
        **indexer_fields(config, interleaved if said is None else said),
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


#: By ``model_type`` of config.json.
MODELS = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _with_indexer("DeepseekV32ForCausalLM", interleaved=False),
    "glm_moe_dsa": _with_indexer("GlmMoeDsaForCausalLM", interleaved=True),
    "deepseek_v4": DEEPSEEK_V4,
}

#: Fields that keys of other names, or several keys, say.
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
}


def key_of(name: str) -> str:
    """Return the key of config.json, or the keys, that say a field of the configuration."""
    tables = (_KEYS, *({x: k for k, x in kind.fields.items()} for kind in MODELS.values()))
    shared = {field: key for keys in (INDEXER, EXPERTS) for key, field in keys.items()}
    return next((table[name] for table in (shared, *tables) if name in table), name)
