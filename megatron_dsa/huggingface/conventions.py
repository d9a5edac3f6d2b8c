"""Conventions: what a model's own ``config.json`` says, in Megatron's terms, or refused.

Weights fit under any rope convention, and a wrong one shows only as a worse model. So every key
that changes what a weight means is read here, and a value that is not understood is an error.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_dsa.config import computes_topk, options_of, uses_indexer
from megatron_dsa.errors import ConfigError
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
from megatron_dsa.huggingface.config_values import check_values, refuse
from megatron_dsa.huggingface.conventions_v4 import V4_TYPE, parse_v4
from megatron_dsa.huggingface.json_files import read_json
from megatron_dsa.huggingface.names import V3

#: Model types, and whether the indexer's rope pairs neighbouring dims (``None``: no indexer).
MODEL_TYPES: dict[str, bool | None] = {
    "deepseek_v3": None,
    "deepseek_v32": False,
    "glm_moe_dsa": True,
}

#: Of the norms of the latents and of the indexer's keys; config.json does not say it.
LATENT_NORM_EPSILON = 1e-6

#: Fields that may differ: they say how the router computes, not what.
_FREE = {"moe_router_dtype"}

#: Key of config.json -> field of the transformer configuration, of the same meaning.
_SAME = {
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
}
#: Keys of the indexer that are read besides; others that begin with "index" are refused.
_INDEXER_KEYS = {
    "indexer_rope_interleave",
    "indexer_types",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
    "index_share_for_mtp_iteration",
}
#: Keys that may be absent and otherwise have only one value that Megatron's layers implement.
_ONLY = {
    "rope_interleave": True,
    "partial_rotary_factor": 1.0,
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
#: Keys of YaRN that are fields, too.
_MSCALES = ("mscale", "mscale_all_dim")


def read_config(path: str | Path) -> HFModel:
    """Read a ``config.json``.

    Args:
        path: of the file, or of the checkpoint directory that holds it.

    Raises:
        ConfigError: it is missing or broken, or says something that is not understood.
    """
    path = Path(path)
    if not path.is_file():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it says what the weights mean; put it there")
    return parse_config(read_json(path), str(path))


def parse_config(config: dict[str, Any], source: str = "config.json") -> HFModel:
    """Return what a config.json means.

    Args:
        config: its content.
        source: what errors call it.

    Raises:
        ConfigError: names the source, the key, the rule and the fix.
    """
    try:
        return _parsed(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _parsed(config: dict[str, Any]) -> HFModel:
    kind = config.get("model_type")
    if kind not in (*MODEL_TYPES, V4_TYPE):
        types = ", ".join((*MODEL_TYPES, V4_TYPE))
        refuse("model_type", kind, f"must be one of {types}; others are unknown")
    check_values(config)
    if kind == V4_TYPE:
        return parse_v4(config)
    check_only(config, _ONLY)
    heads = required(config, "num_attention_heads")
    if config.get("num_key_value_heads", heads) != heads:
        refuse(
            "num_key_value_heads",
            config["num_key_value_heads"],
            f"must be num_attention_heads ({heads}): multi-latent attention shares no heads",
        )
    fields = {field: required(config, key) for key, field in _SAME.items()}
    fields |= _rope(config) | _experts(config)
    if MODEL_TYPES[kind] is not None:
        fields |= _indexer(config, MODEL_TYPES[kind])
    same = config["rms_norm_eps"] == LATENT_NORM_EPSILON
    return model_of(config, fields, V3, None if same else LATENT_NORM_EPSILON, _remarks(config))


def _remarks(config: dict) -> tuple[str, ...]:
    remarks = []
    if config.get("index_share_for_mtp_iteration"):
        remarks.append(
            "index_share_for_mtp_iteration has no counterpart: layers of multi-token prediction "
            "select by themselves"
        )
    return tuple(remarks)


def _rope(config: dict) -> dict[str, Any]:
    """Rotary fields. Attention's rope pairs neighbouring dims on both sides."""
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(where) or {}
    keys = ROPE_KEYS | {"yarn": ROPE_KEYS["yarn"].union(_MSCALES)}
    kind = rope_type(rope, keys, where)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"{where}.partial_rotary_factor",
            rope["partial_rotary_factor"],
            "must be 1: qk_rope_head_dim says which dims rotate",
        )
    base = rope.get("rope_theta") or required(config, "rope_theta")
    if kind == "default":
        # The scaling factor enters Megatron's softmax scale whatever the type of rope is.
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    return {"rotary_base": base, **yarn_fields(rope, where, _MSCALES)}


def _experts(config: dict) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = config.get("mlp_layer_types")
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
    if groups > 1 and fields["moe_router_topk"] != 2 * chosen:
        refuse(
            "topk_group",
            chosen,
            f"must be half of num_experts_per_tok ({fields['moe_router_topk']}): Megatron judges a "
            "group by its best num_experts_per_tok / topk_group experts, the model by its best two",
        )
    return fields | {
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_score_function": "sigmoid",
    }


def _indexer(config: dict, interleaved: bool) -> dict[str, Any]:
    check_indexer_keys(config, _INDEXER_KEYS)
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        refuse("indexer_rope_interleave", said, "must be true or false")
    return {
        **indexer_fields(config, interleaved if said is None else said),
        "dsa_indexer_k_norm_epsilon": LATENT_NORM_EPSILON,
        **_index_sharing(config),
    }


def _sharing(freq: int, offset: int) -> SimpleNamespace:
    return SimpleNamespace(dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)


def _index_sharing(config: dict) -> dict[str, Any]:
    """Which layers have an indexer: GLM lists them, Megatron has a frequency and an offset."""
    layers = config["num_hidden_layers"]
    freq, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    listed = config.get("indexer_types") or config.get("index_topk_pattern")
    if listed is None:
        if freq > 1 and not offset:
            refuse("index_skip_topk_offset", offset, "must be 1 or more with index_topk_freq > 1")
        return vars(_sharing(freq, offset or 0))
    key = "indexer_types" if config.get("indexer_types") else "index_topk_pattern"
    if unknown := [kind for kind in listed if kind not in ("full", "F", "shared", "S")]:
        refuse(key, unknown[0], "must say full (F) or shared (S) for every layer")
    full = [kind in ("full", "F") for kind in listed]
    candidates = [_sharing(freq, offset or 0)] if freq > 1 else []
    candidates += [_sharing(f, o) for f in range(1, layers + 1) for o in range(layers + 1)]
    for rule in candidates:
        if full == [computes_topk(rule, layer + 1) for layer in range(layers)]:
            return vars(rule)
    refuse(key, listed, "must be leading full layers, then one full layer in every few")


def check_model(hf: HFModel, config: Any) -> None:
    """Raise unless a Megatron model's configuration describes the Hugging Face model.

    Fields of the indexer are compared where the Megatron model has one.
    """
    complaints = []
    for name, expected in hf.fields.items():
        if name in _FREE or (name.startswith("dsa_") and not uses_indexer(config)):
            continue
        actual = getattr(config, name, None)
        if name == "moe_layer_freq" and isinstance(actual, int):
            actual = [int(layer % actual == 0) for layer in range(config.num_layers)]
        if name == "dsa_indexer_k_norm_epsilon" and actual is None:
            actual = config.layernorm_epsilon
        if name == "csa_compress_ratios" and actual is not None:
            # Models may leave out multi-token prediction.
            expected = expected[: hf.num_layers + (config.mtp_num_layers or 0)]
        if actual != expected:
            complaints.append(f"{name} is {actual!r} in the model, {expected!r} by config.json")
    actual, of_all = options_of(config).latent_norm_epsilon, hf.fields["layernorm_epsilon"]
    expected = hf.latent_norm_epsilon or of_all
    if (actual or of_all) != expected:
        complaints.append(
            f"--dsa-latent-norm-epsilon is {actual!r} for the model, {expected!r} by config.json"
        )
    if complaints:
        raise ConfigError(
            "the Megatron model is not the model of the checkpoint; change its flags:\n"
            + "\n".join(f"  - {complaint}" for complaint in complaints)
        )
