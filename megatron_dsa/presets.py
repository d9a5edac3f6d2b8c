"""The attention of released models as configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_dsa.config import DSATransformerConfig
from megatron_dsa.errors import ConfigError

#: Attention shapes of released models as keyword arguments of :class:`DSATransformerConfig`.
#: GLM-5 gives what is public and verified; the rest has to come from the model's own config.
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        "num_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "dsa_indexer_n_heads": 64,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "dsa_indexer_rope_interleaved": False,
    },
    "glm-5": {
        "num_layers": 78,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_head_dim": 192,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 256,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "dsa_indexer_rope_interleaved": True,
    },
}


def preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return the configuration of a released model, with ``changes`` on top.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; available: {', '.join(sorted(PRESETS))}")
    known = {f.name for f in dataclasses.fields(DSATransformerConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"preset {name!r}: no such configuration field: {', '.join(unknown)}")
    return DSATransformerConfig(**PRESETS[name] | changes)
