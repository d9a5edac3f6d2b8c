"""Released models as configurations: the attention alone, or the whole model."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.nn.functional import silu

from megatron_dsa.config import CSATransformerConfig, DSAOptions, DSATransformerConfig
from megatron_dsa.errors import ConfigError


def _shapes(
    *, layers: int, hidden: int, heads: int, q_lora: int, topk: int, index_heads: int = 64
) -> dict[str, Any]:
    """Return what every attention has, from its numbers."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "q_lora_rank": q_lora,
        "kv_lora_rank": 512,
        "qk_pos_emb_head_dim": 64,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "dsa_indexer_n_heads": index_heads,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": topk,
        "dsa_indexer_rope_interleaved": True,
    }


def _v4(*, layers: int, groups: int, first: int) -> dict[str, Any]:
    """Return what DeepSeek-V4's attention has besides; ``first``: ratio of the first two layers."""
    return {
        "mtp_num_layers": 1,
        "csa_compress_ratios": [first, first, 4] + [128, 4] * ((layers - 3) // 2) + [0],
        "csa_window_size": 128,
        "kv_lora_rank": 448,  # not used; what Megatron's development branch writes there
        "qk_head_dim": 448,
        "v_head_dim": 512,
        "o_groups": groups,
        "o_lora_rank": 1024,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "rotary_base": 10000,
        "csa_compress_rotary_base": 160000,
        **_yarn(16, 65536),
    }


def _yarn(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
    }


#: The attention of released models as keyword arguments of their configuration's class.
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": _shapes(layers=61, hidden=7168, heads=128, q_lora=1536, topk=2048)
    | {"qk_head_dim": 128, "v_head_dim": 128, "dsa_indexer_rope_interleaved": False},
    "glm-5": _shapes(layers=78, hidden=6144, heads=64, q_lora=2048, topk=2048, index_heads=32)
    | {"qk_head_dim": 192, "v_head_dim": 256},
    "deepseek-v4-flash": _shapes(layers=43, hidden=4096, heads=64, q_lora=1024, topk=512)
    | _v4(layers=43, groups=8, first=0),
    "deepseek-v4-pro": _shapes(layers=61, hidden=7168, heads=128, q_lora=1536, topk=1024)
    | _v4(layers=61, groups=16, first=128),
}


def _experts(*, number: int, size: int, chosen: int, scale: float) -> dict[str, Any]:
    """Return what the experts of every model have; one of a layer is shared by all tokens."""
    return {
        "gated_linear_unit": True,
        "activation_func": silu,
        "hidden_dropout": 0.0,
        "num_moe_experts": number,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": size,
        "moe_shared_expert_intermediate_size": size,
        "moe_router_topk_scaling_factor": scale,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def _after_dense_layers(*, layers: int, dense_size: int) -> dict[str, Any]:
    """Return the MLPs of DeepSeek-V3.2 and GLM-5, whose first three layers have no experts."""
    return _experts(number=256, size=2048, chosen=8, scale=2.5) | {
        "ffn_hidden_size": dense_size,
        "moe_layer_freq": [0] * 3 + [1] * (layers - 3),
        "mtp_num_layers": 1,
        "normalization": "RMSNorm",
    }


def _around_v4(*, number: int, size: int, scale: float) -> dict[str, Any]:
    """Return streams, hash routing and experts of DeepSeek-V4."""
    return _experts(number=number, size=size, chosen=6, scale=scale) | {
        "moe_layer_freq": 1,
        "moe_router_score_function": "sqrtsoftplus",
        # Megatron's fused SwiGLU leaves out the clamp.
        "activation_func_clamp_value": 10.0,
        "bias_activation_fusion": False,
        "moe_hash_layers": 3,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
    }


#: What the models of :data:`PRESETS` have around their attention, likewise.
AROUND: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": _after_dense_layers(layers=61, dense_size=18432)
    | {
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "layernorm_epsilon": 1e-6,
        "rotary_base": 10000,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        **_yarn(40, 4096),
    },
    "glm-5": _after_dense_layers(layers=78, dense_size=12288)
    | {
        "layernorm_epsilon": 1e-5,
        "rotary_base": 1000000,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa": DSAOptions(latent_norm_epsilon=1e-6),
    },
    "deepseek-v4-flash": _around_v4(number=256, size=2048, scale=1.5),
    "deepseek-v4-pro": _around_v4(number=384, size=3072, scale=2.5),
}
#: Rows of the models' embeddings, which are no field of a configuration.
VOCABULARY = {
    "deepseek-v3.2": 129280,
    "glm-5": 154880,
    "deepseek-v4-flash": 129280,
    "deepseek-v4-pro": 129280,
}


def preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return a configuration with the attention of a released model, and ``changes`` on top.

    V4's are :class:`CSATransformerConfig`. MLPs, experts, the residual and, but for V4, norms and
    rope are Megatron's defaults: :func:`model_preset` has them.

    Raises:
        ConfigError: for an unknown name or field.
    """
    return _configuration(name, {}, changes)


def model_preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return the configuration of a whole released model, and ``changes`` on top.

    It has the fields that say what the weights mean, as the model's ``config.json`` does. How the
    model is trained (balancing, weights of losses) is left open. :data:`VOCABULARY` has the rows of
    its embedding.

    Raises:
        ConfigError: for an unknown name or field.
    """
    return _configuration(name, AROUND, changes)


def _configuration(
    name: str, around: dict[str, dict[str, Any]], changes: dict[str, Any]
) -> DSATransformerConfig:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; available: {', '.join(sorted(PRESETS))}")
    kind = CSATransformerConfig if "csa_compress_ratios" in PRESETS[name] else DSATransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"preset {name!r}: no such configuration field: {', '.join(unknown)}")
    fields = PRESETS[name] | around.get(name, {}) | changes
    if "dsa" in changes and "dsa" in around.get(name, {}):
        # Options that are given say how it runs; the model's epsilon is part of what it is.
        own = around[name]["dsa"].latent_norm_epsilon
        epsilon = changes["dsa"].latent_norm_epsilon or own
        fields["dsa"] = dataclasses.replace(changes["dsa"], latent_norm_epsilon=epsilon)
    return kind(**fields)
