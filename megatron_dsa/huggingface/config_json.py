"""What is read the same way from the ``config.json`` of every model, and refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.huggingface.config_values import SIZE, refuse
from megatron_dsa.huggingface.names import Names
from megatron_dsa.huggingface.quantised import Quantisation

#: Key of config.json -> field of the transformer configuration, of the same meaning.
_SAME_INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
_SAME_EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
#: Fields that no key of config.json says.
_COMMON = {
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "multi_latent_attention": True,
}
#: Keys that may be absent and otherwise have only one value that Megatron's layers implement.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
}
_PLAIN_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
#: Keys of the rope parameters by rope type.
ROPE_KEYS = {
    "default": _PLAIN_ROPE,
    "yarn": _PLAIN_ROPE
    | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"},
}


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face model's configuration.

    Attributes:
        raw: config.json as it is.
        fields: arguments of the transformer configuration that describe the same model.
        num_layers, mtp_layers: decoder and multi-token-prediction layers.
        vocab_size: without padding.
        names: the table of the model's tensors.
        has_indexer: the model type has indexers.
        dtype: of weights that are not quantised; ``None``: that in which they are stored.
        quantisation: how quantised weights are stored, and what they become.
        latent_norm_epsilon: of the norms of MLA's latents; ``None``: that of all norms.
        remarks: where Megatron's layers differ a little from the model.
    """

    raw: dict[str, Any]
    fields: dict[str, Any]
    num_layers: int
    mtp_layers: int
    vocab_size: int
    names: Names
    has_indexer: bool
    dtype: torch.dtype | None
    quantisation: Quantisation
    latent_norm_epsilon: float | None
    remarks: tuple[str, ...]


def required(config: dict, key: str) -> Any:
    """Return the value of a key that must be there."""
    if config.get(key) is None:
        refuse(key, None, "it must be given; use the config.json that came with the weights")
    return config[key]


def check_only(config: dict, only: dict[str, Any]) -> None:
    """Raise for a key that has another value than the one that Megatron's layers implement.

    Args:
        config: config.json.
        only: the value by key, besides those of all models.
    """
    for key, value in (_ONLY | only).items():
        if config.get(key, value) not in (value, None):
            refuse(key, config[key], f"only {value!r} is supported; such a model cannot be used")


def check_indexer_keys(config: dict, more: set[str] = frozenset()) -> None:
    """Raise for a key of the indexer that is not one of all models, nor of ``more``."""
    known = more.union(_SAME_INDEXER)
    unknown = sorted(key for key in config if key.startswith("index") and key not in known)
    if unknown:
        refuse(unknown[0], config[unknown[0]], "this key of the indexer is not understood")


def rope_type(rope: dict, keys: dict[str, set[str]], where: str) -> str:
    """Return the type of rope parameters.

    Args:
        rope: the parameters.
        keys: those that are understood, by type.
        where: their name in config.json.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(keys):
        refuse(f"{where}.rope_type", kind, f"must be {' or '.join(keys)}")
    for key in sorted(set(rope) - keys[kind]):
        refuse(f"{where}.{key}", rope[key], f"not understood for rope type {kind}")
    return kind


def yarn_fields(rope: dict, where: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of YaRN but for the base.

    Args:
        rope: the parameters.
        where: their name in config.json.
        more: keys that are required, too, and that are called like their fields.
    """
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


def indexer_fields(config: dict, rope_interleaved: bool) -> dict[str, Any]:
    """Return the fields of an indexer, whose rope pairs neighbouring dims or halves."""
    fields = {field: required(config, key) for key, field in _SAME_INDEXER.items()}
    return fields | {
        "dsa_indexer_rope_interleaved": rope_interleaved,
        "dsa_indexer_scoring_relu": True,
    }


def expert_fields(config: dict, pattern: list[int]) -> dict[str, Any]:
    """Return the fields of experts and their router.

    Args:
        config: config.json.
        pattern: 1 for every layer with experts, 0 for others.
    """
    fields = {field: required(config, key) for key, field in _SAME_EXPERTS.items()}
    if fields["moe_router_topk"] < 2:
        refuse(
            "num_experts_per_tok",
            fields["moe_router_topk"],
            "must be 2 or more: Megatron does not normalise one",
        )
    shared = config.get("n_shared_experts") or 0
    return fields | {
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def model_of(
    config: dict,
    fields: dict[str, Any],
    names: Names,
    latent_norm_epsilon: float | None = None,
    remarks: tuple[str, ...] = (),
) -> HFModel:
    """Return a model; ``fields`` are those that not all models have in common."""
    dtype = _unquantised_dtype(config)
    return HFModel(
        raw=config,
        fields=fields | _COMMON,
        num_layers=required(config, "num_hidden_layers"),
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
        vocab_size=required(config, "vocab_size"),
        names=names,
        has_indexer=not fields.keys().isdisjoint(_SAME_INDEXER.values()),
        dtype=dtype,
        quantisation=Quantisation(
            _fp8_block(config), _has_fp4_experts(config), dtype or torch.bfloat16
        ),
        latent_norm_epsilon=latent_norm_epsilon,
        remarks=remarks,
    )


def _fp8_block(config: dict) -> tuple[int, int] | None:
    """Return rows and columns that share a scale; ``None`` if weights are not quantised."""
    quantised = config.get("quantization_config")
    if quantised is None:
        return None
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method != "fp8":
        refuse("quantization_config.quant_method", method, "must be fp8, or nothing quantised")
    if not (isinstance(block, list) and len(block) == 2 and all(map(SIZE.allows, block))):
        refuse(
            "quantization_config.weight_block_size", block, "must be [rows, columns], both positive"
        )
    return tuple(block)


def _has_fp4_experts(config: dict) -> bool:
    """Whether the weights of experts are fp4; the key is at the top or with the quantisation."""
    quantised = config.get("quantization_config") or {}
    return "fp4" in (config.get("expert_dtype"), quantised.get("expert_dtype"))


def _unquantised_dtype(config: dict) -> torch.dtype | None:
    """Return the dtype of weights that are not quantised; ``None``: config.json does not say."""
    said = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    for key, name in said.items():
        if name not in ("bfloat16", "float16", "float32", "float64"):
            refuse(key, name, "must be bfloat16, float16, float32 or float64")
    if len(set(said.values())) > 1:
        refuse("dtype", said["dtype"], f"contradicts torch_dtype = {said['torch_dtype']!r}")
    return getattr(torch, next(iter(said.values()))) if said else None
