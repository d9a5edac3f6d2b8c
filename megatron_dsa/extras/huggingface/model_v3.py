"""DeepSeek-V3, DeepSeek-V3.2 and GLM-5: keys of ``config.json``."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from megatron_dsa.config.model import computes_topk
from megatron_dsa.extras.huggingface.keys import (
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
from megatron_dsa.extras.huggingface.names import V3

ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}


#: Norm epsilon of latents and index keys, absent in config.json.
_LATENT_NORM_EPSILON = 1e-6
_MSCALES = ("mscale", "mscale_all_dim")


def check_heads(config: dict) -> Fields:
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


def grouped_experts(config: dict) -> Fields:
    """Return the fields of layers with experts, routed in groups of them."""
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


def dsa_indexer(config: dict, *, interleaved: bool) -> Fields:
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        refuse("indexer_rope_interleave", said, "must be true or false")
    return {
        **indexer_fields(config, interleaved if said is None else said),
        "dsa_indexer_k_norm_epsilon": _LATENT_NORM_EPSILON,
        **_index_sharing(config),
    }


SHARING_KEYS = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


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


DEEPSEEK_V3 = Model(
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
    aliases=ALIASES,
    converters=(check_heads, _mla, grouped_experts),
    latent_norm_epsilon=_LATENT_NORM_EPSILON,
    remarks={
        "index_share_for_mtp_iteration": "index_share_for_mtp_iteration has no counterpart: layers "
        "of multi-token prediction select by themselves"
    },
)


def with_indexer(architecture: str, interleaved: bool) -> Model:
    indexer: Callable[[dict], Fields] = partial(dsa_indexer, interleaved=interleaved)
    converters = (*DEEPSEEK_V3.converters, indexer)
    known = ("indexer_rope_interleave", "index_share_for_mtp_iteration", *INDEXER, *SHARING_KEYS)
    return dataclasses.replace(
        DEEPSEEK_V3, architecture=architecture, converters=converters, closed={"index": known}
    )
