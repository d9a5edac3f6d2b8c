"""The attention of released models as configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_dsa.config import CSATransformerConfig, DSATransformerConfig
from megatron_dsa.errors import ConfigError


def _shapes(
    *, layers: int, hidden: int, heads: int, q_lora: int, topk: int, index_heads: int = 64
) -> dict[str, Any]:
    """Return what every model has, from its numbers."""
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
    """Return what DeepSeek-V4 has besides; ``first``: ratio of the first two layers."""
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
    }


#: Attention shapes of released models as keyword arguments of their configuration's class.
#: GLM-5 has the public and verified ones; the rest has to come from the model's own config.
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
#: What public sources disagree on, and is no part of a preset of V4.
NEEDED_FOR_V4 = (
    "rotary_base",
    "csa_compress_rotary_base",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
)


def preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return the configuration of a released model, with ``changes`` on top.

    V4's are :class:`CSATransformerConfig` and need :data:`NEEDED_FOR_V4`.

    Raises:
        ConfigError: for an unknown name or field, or a field that is needed and missing.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; available: {', '.join(sorted(PRESETS))}")
    is_v4 = "csa_compress_ratios" in PRESETS[name]
    kind = CSATransformerConfig if is_v4 else DSATransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"preset {name!r}: no such configuration field: {', '.join(unknown)}")
    missing = [field for field in NEEDED_FOR_V4 if is_v4 and field not in changes]
    if missing:
        raise ConfigError(
            f"preset {name!r} needs {', '.join(missing)}: take them from the model's own "
            "configuration (rope_theta, compress_rope_theta, rope_scaling)"
        )
    return kind(**PRESETS[name] | changes)
