"""Conventions: what a model's own ``config.json`` says, in Megatron's terms, or refused.

Weights fit under any rope convention, and a wrong one shows only as a worse model. So every key
that changes what a weight means is read here, and a value that is not understood is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dsa.config import computes_topk, uses_indexer
from megatron_dsa.errors import ConfigError

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
_SAME_INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
_SAME_MOE = {
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
#: Keys of the indexer that are read; others that begin with "index" are refused.
_INDEXER_KEYS = {
    *_SAME_INDEXER,
    "indexer_rope_interleave",
    "indexer_types",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
    "index_share_for_mtp_iteration",
}
#: Keys that may be absent and otherwise have only one value that Megatron's layers implement.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "partial_rotary_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
#: Keys of the rope parameters by rope type.
_ROPE_KEYS = {
    "default": {"rope_theta", "rope_type", "type", "partial_rotary_factor"},
    "yarn": {
        *("rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate"),
    },
}


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face model's configuration.

    Attributes:
        raw: config.json as it is.
        fields: arguments of the transformer configuration that describe the same model.
        num_layers, mtp_layers: decoder and multi-token-prediction layers.
        vocab_size: without padding.
        has_indexer: the model type has indexers.
        block: rows and columns that share a scale where weights are fp8, else ``None``.
        dtype: of weights that are not quantised.
        remarks: where Megatron's layers differ a little from the model.
    """

    raw: dict[str, Any]
    fields: dict[str, Any]
    num_layers: int
    mtp_layers: int
    vocab_size: int
    has_indexer: bool
    block: tuple[int, int] | None
    dtype: torch.dtype
    remarks: tuple[str, ...]


def _refuse(key: str, value: Any, rule: str) -> None:
    raise ConfigError(f"config.json: {key} = {value!r}: {rule}")


def _get(config: dict, key: str) -> Any:
    if config.get(key) is None:
        _refuse(key, None, "it must be given; use the config.json that came with the weights")
    return config[key]


def read_config(directory: str | Path) -> HFModel:
    """Read ``config.json`` of a checkpoint directory.

    Raises:
        ConfigError: it is missing, or says something that is not understood.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it says what the weights mean; put it there")
    return parse_config(json.loads(path.read_text()))


def parse_config(config: dict[str, Any]) -> HFModel:
    """Return what a config.json means. Errors name its key, the rule and the fix."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        _refuse("model_type", kind, f"must be one of {', '.join(MODEL_TYPES)}; others are unknown")
    for key, only in _ONLY.items():
        if config.get(key, only) not in (only, None):
            _refuse(key, config[key], f"only {only!r} is supported; such a model cannot be used")
    heads = _get(config, "num_attention_heads")
    if config.get("num_key_value_heads", heads) != heads:
        _refuse(
            "num_key_value_heads",
            config["num_key_value_heads"],
            f"must be num_attention_heads ({heads}): multi-latent attention shares no heads",
        )
    fields = {field: _get(config, key) for key, field in _SAME.items()}
    fields |= _rope(config) | _experts(config)
    if MODEL_TYPES[kind] is not None:
        fields |= _indexer(config, MODEL_TYPES[kind])
    fields |= {
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "multi_latent_attention": True,
    }
    return HFModel(
        raw=config,
        fields=fields,
        num_layers=config["num_hidden_layers"],
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
        vocab_size=_get(config, "vocab_size"),
        has_indexer=MODEL_TYPES[kind] is not None,
        block=_fp8_block(config),
        dtype=_dtype(config),
        remarks=_remarks(config),
    )


def _remarks(config: dict) -> tuple[str, ...]:
    remarks, epsilon = [], config["rms_norm_eps"]
    if epsilon != LATENT_NORM_EPSILON:
        remarks.append(
            f"the norms of the latents have epsilon {LATENT_NORM_EPSILON} in the model and "
            f"rms_norm_eps = {epsilon} in Megatron, which has one for all norms"
        )
    if config.get("index_share_for_mtp_iteration"):
        remarks.append(
            "index_share_for_mtp_iteration has no counterpart: layers of multi-token prediction "
            "select by themselves"
        )
    return tuple(remarks)


def _rope(config: dict) -> dict[str, Any]:
    """Rotary fields. Attention's rope pairs neighbouring dims on both sides."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        _refuse("rope_parameters.rope_type", kind, "must be default or yarn")
    for key in sorted(set(rope) - _ROPE_KEYS[kind]):
        _refuse(f"rope_parameters.{key}", rope[key], f"not understood for rope type {kind}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(
            "rope_parameters.partial_rotary_factor",
            rope["partial_rotary_factor"],
            "must be 1: qk_rope_head_dim says which dims rotate",
        )
    base = rope.get("rope_theta") or _get(config, "rope_theta")
    if kind == "default":
        # The scaling factor enters Megatron's softmax scale whatever the type of rope is.
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    for key in ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"):
        if not rope.get(key):
            _refuse(f"rope_parameters.{key}", rope.get(key), "must be given and positive with yarn")
    if rope.get("truncate", True) is not True:
        _refuse("rope_parameters.truncate", rope["truncate"], "Megatron rounds the yarn range")
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope["mscale"],
        "mscale_all_dim": rope["mscale_all_dim"],
    }


def _experts(config: dict) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = config.get("mlp_layer_types")
    if pattern is None:
        dense = min(config.get("first_k_dense_replace") or 0, layers)
        experts = config.get("n_routed_experts") is not None
        pattern = ["dense"] * dense + ["sparse" if experts else "dense"] * (layers - dense)
    if len(pattern) != layers or set(pattern) - {"dense", "sparse"}:
        _refuse("mlp_layer_types", pattern, "must say dense or sparse for every layer")
    if "sparse" not in pattern:
        return {"num_moe_experts": None}
    fields = {field: _get(config, key) for key, field in _SAME_MOE.items()}
    shared = config.get("n_shared_experts") or 0
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1 and fields["moe_router_topk"] != 2 * chosen:
        _refuse(
            "topk_group",
            chosen,
            f"must be half of num_experts_per_tok ({fields['moe_router_topk']}): Megatron judges a "
            "group by its best num_experts_per_tok / topk_group experts, the model by its best two",
        )
    if fields["moe_router_topk"] < 2:
        _refuse("num_experts_per_tok", 1, "must be 2 or more: Megatron does not normalise one")
    return fields | {
        "moe_layer_freq": [int(kind == "sparse") for kind in pattern],
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def _indexer(config: dict, interleaved: bool) -> dict[str, Any]:
    unknown = sorted(key for key in config if key.startswith("index") and key not in _INDEXER_KEYS)
    if unknown:
        _refuse(unknown[0], config[unknown[0]], "this key of the indexer is not understood")
    said = config.get("indexer_rope_interleave")
    if said is not None and not isinstance(said, bool):
        _refuse("indexer_rope_interleave", said, "must be true or false")
    fields = {field: _get(config, key) for key, field in _SAME_INDEXER.items()}
    return fields | {
        "dsa_indexer_rope_interleaved": interleaved if said is None else said,
        "dsa_indexer_k_norm_epsilon": LATENT_NORM_EPSILON,
        "dsa_indexer_scoring_relu": True,
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
            _refuse("index_skip_topk_offset", offset, "must be 1 or more with index_topk_freq > 1")
        return vars(_sharing(freq, offset or 0))
    full = [kind in ("full", "F") for kind in listed]
    candidates = [_sharing(freq, offset or 0)] if freq > 1 else []
    candidates += [_sharing(f, o) for f in range(1, layers + 1) for o in range(layers + 1)]
    for rule in candidates:
        if full == [computes_topk(rule, layer + 1) for layer in range(layers)]:
            return vars(rule)
    key = "indexer_types" if config.get("indexer_types") else "index_topk_pattern"
    _refuse(key, listed, "must be leading full layers, then one full layer in every few")


def _fp8_block(config: dict) -> tuple[int, int] | None:
    quantised = config.get("quantization_config")
    if quantised is None:
        return None
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method != "fp8":
        _refuse("quantization_config.quant_method", method, "must be fp8, or nothing quantised")
    if not (isinstance(block, list) and len(block) == 2):
        _refuse("quantization_config.weight_block_size", block, "must be [rows, columns]")
    return tuple(block)


def _dtype(config: dict) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        _refuse("torch_dtype", name, "must be bfloat16, float16, float32 or float64")
    return dtype


def check_model(hf: HFModel, config: Any) -> None:
    """Raise unless a Megatron model's configuration describes the Hugging Face model.

    Fields of the indexer are compared where the Megatron model has one.
    """
    problems = []
    for name, expected in hf.fields.items():
        if name in _FREE or (name.startswith("dsa_") and not uses_indexer(config)):
            continue
        actual = getattr(config, name)
        if name == "moe_layer_freq" and isinstance(actual, int):
            actual = [int(layer % actual == 0) for layer in range(config.num_layers)]
        if name == "dsa_indexer_k_norm_epsilon" and actual is None:
            actual = config.layernorm_epsilon
        if actual != expected:
            problems.append(f"{name} is {actual!r} in the model, {expected!r} by config.json")
    if problems:
        raise ConfigError(
            "the Megatron model is not the model of the checkpoint; change its flags:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
