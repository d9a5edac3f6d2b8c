"""Released models, as configurations and as flags.

Torch is imported late, which saves the command ``flags`` seconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_dsa.config.fields import flag_words
from megatron_dsa.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from megatron_dsa.config.transformer import DSATransformerConfig


def _shapes(
    *, layers: int, hidden: int, heads: int, q_lora: int, topk: int, index_heads: int = 64
) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "q_lora_rank": q_lora, "kv_lora_rank": 512, "qk_pos_emb_head_dim": 64,
        "qk_layernorm": True, "add_bias_linear": False, "attention_dropout": 0.0,
        "dsa_indexer_n_heads": index_heads, "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": topk, "dsa_indexer_rope_interleaved": True,
    }  # fmt: skip


def _v4(*, layers: int, groups: int, first: int) -> dict[str, Any]:
    """Return DeepSeek-V4's fields; the first two layers have compression ratio ``first``."""
    return {
        "mtp_num_layers": 1,
        "csa_compress_ratios": [first, first, 4] + [128, 4] * ((layers - 3) // 2) + [0],
        "csa_window_size": 128,
        "kv_lora_rank": 448,  # unused by DeepSeek-V4
        "qk_head_dim": 448, "v_head_dim": 512, "o_groups": groups, "o_lora_rank": 1024,
        "normalization": "RMSNorm", "layernorm_epsilon": 1e-6,
        "rotary_base": 10000, "csa_compress_rotary_base": 160000, **_yarn(16, 65536),
    }  # fmt: skip


#: Preset keys that are fields of :class:`DSAOptions`.
LATENT_EPSILON, POOL_SIZE = "dsa_latent_norm_epsilon", "dsa_indexer_pool_size"
_OPTIONS = {LATENT_EPSILON: "latent_norm_epsilon", POOL_SIZE: "indexer_pool_size"}


def _glm_5_3(*, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "qk_pos_emb_head_dim": 0, "dsa_indexer_rotate_activation": False, POOL_SIZE: 4,
        "linear_attention_freq": [int(layer % 4 != 3) for layer in range(layers)],
        "linear_num_key_heads": heads, "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip


def _yarn(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "rotary_scaling_factor": factor, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": original,
    }  # fmt: skip


#: Model -> configuration arguments of the model's attention.
PRESETS: dict[str, dict[str, Any]] = {
    "v3.2": _shapes(layers=61, hidden=7168, heads=128, q_lora=1536, topk=2048)
    | {"qk_head_dim": 128, "v_head_dim": 128, "dsa_indexer_rope_interleaved": False},
    "glm-5": _shapes(layers=78, hidden=6144, heads=64, q_lora=2048, topk=2048, index_heads=32)
    | {"qk_head_dim": 192, "v_head_dim": 256},
    "glm-5.3-flash": _shapes(
        layers=45, hidden=4096, heads=64, q_lora=1536, topk=2048, index_heads=32
    )
    | {"qk_head_dim": 256, "v_head_dim": 256}
    | _glm_5_3(layers=45, heads=64, head_dim=128),
    "v4-flash": _shapes(layers=43, hidden=4096, heads=64, q_lora=1024, topk=512)
    | _v4(layers=43, groups=8, first=0),
    "v4-pro": _shapes(layers=61, hidden=7168, heads=128, q_lora=1536, topk=1024)
    | _v4(layers=61, groups=16, first=128),
}


def _experts(*, number: int, size: int, chosen: int, scale: float) -> dict[str, Any]:
    return {
        "gated_linear_unit": True, "hidden_dropout": 0.0,
        "num_moe_experts": number, "moe_router_topk": chosen, "moe_ffn_hidden_size": size,
        "moe_shared_expert_intermediate_size": size,  # one shared expert per layer
        "moe_router_topk_scaling_factor": scale, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
    }  # fmt: skip


def _after_dense_layers(*, layers: int, dense_size: int, number: int = 256) -> dict[str, Any]:
    return _experts(number=number, size=2048, chosen=8, scale=2.5) | {
        "ffn_hidden_size": dense_size,
        "moe_layer_freq": [0] * 3 + [1] * (layers - 3),
        "mtp_num_layers": 1,
        "normalization": "RMSNorm",
    }


#: Megatron's fused SwiGLU omits the clamp.
_CLAMPED = {"activation_func_clamp_value": 10.0, "bias_activation_fusion": False}
_STREAMS = {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}


def _around_v4(*, number: int, size: int, scale: float) -> dict[str, Any]:
    return _experts(number=number, size=size, chosen=6, scale=scale) | {
        "moe_layer_freq": 1, "moe_router_score_function": "sqrtsoftplus", "moe_hash_layers": 3,
        **_CLAMPED, **_STREAMS,
    }  # fmt: skip


#: Model -> configuration arguments of the model's MLPs, residuals and norms.
AROUND: dict[str, dict[str, Any]] = {
    "v3.2": _after_dense_layers(layers=61, dense_size=18432)
    | {
        "moe_router_num_groups": 8, "moe_router_group_topk": 4, "layernorm_epsilon": 1e-6,
        "rotary_base": 10000, "mscale": 1.0, "mscale_all_dim": 1.0,
        "dsa_indexer_k_norm_epsilon": 1e-6, **_yarn(40, 4096),
    },
    "glm-5": _after_dense_layers(layers=78, dense_size=12288)
    | {
        "layernorm_epsilon": 1e-5, "rotary_base": 1000000, "rope_type": "rope",
        "rotary_scaling_factor": 1.0, "dsa_indexer_k_norm_epsilon": 1e-6,
        LATENT_EPSILON: 1e-6,
    },
    "glm-5.3-flash": _after_dense_layers(layers=45, dense_size=12288, number=288)
    | {
        "layernorm_epsilon": 1e-5, "rope_type": "rope", "rotary_scaling_factor": 1.0,
        "dsa_indexer_k_norm_epsilon": 1e-6, "hc_collapse": "mean", **_CLAMPED, **_STREAMS,
    },
    "v4-flash": _around_v4(number=256, size=2048, scale=1.5),
    "v4-pro": _around_v4(number=384, size=3072, scale=2.5),
}  # fmt: skip
#: Vocabulary sizes of released models, which no configuration field holds.
VOCABULARY = {
    "v3.2": 129280,
    "glm-5": 154880,
    "glm-5.3-flash": 154880,
    "v4-flash": 129280,
    "v4-pro": 129280,
}


def preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return a configuration with a released model's attention, updated by ``changes``.

    Other fields have Megatron's defaults, except V4's norms and rope.

    Raises:
        ConfigError: unknown name or field.
    """
    return _configuration(name, {}, changes)


def model_preset(name: str, **changes: Any) -> DSATransformerConfig:
    """Return the configuration of a whole released model, updated by ``changes``.

    Training settings keep Megatron's defaults; :data:`VOCABULARY` has the embedding's size.

    Raises:
        ConfigError: unknown name or field.
    """
    return _configuration(name, AROUND, changes)


def _configuration(
    name: str, around: dict[str, dict[str, Any]], changes: dict[str, Any]
) -> DSATransformerConfig:
    from torch.nn.functional import silu

    from megatron_dsa.config.options import DSAOptions
    from megatron_dsa.config.transformer import CSATransformerConfig, DSATransformerConfig

    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, PRESETS)}")
    kind = CSATransformerConfig if "csa_compress_ratios" in PRESETS[name] else DSATransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"preset {name!r}: no such configuration field: {', '.join(unknown)}")
    fields = PRESETS[name] | around.get(name, {})
    of_model = {ours: fields.pop(flag) for flag, ours in _OPTIONS.items() if flag in fields}
    if fields.get("gated_linear_unit"):
        fields["activation_func"] = silu
    fields |= changes
    # The released model's options apply unless ``dsa`` sets other values.
    options, default = fields.get("dsa", DSAOptions()), DSAOptions()
    unsaid = {x: y for x, y in of_model.items() if getattr(options, x) == getattr(default, x)}
    options = dataclasses.replace(options, **unsaid)
    return kind(**fields | {"dsa": options})


#: Flags set for every model, since Megatron's defaults of embedding and dropout differ.
ALWAYS = (
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
#: Context lengths of released models.
_POSITIONS = {
    "v3.2": 163840,
    "glm-5": 202752,
    "glm-5.3-flash": 1048576,
    "v4-flash": 1048576,
    "v4-pro": 1048576,
}
#: Settings of the indexer loss, over selected keys in stage sparse.
_INDEXER_LOSS = {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": True}
#: DeepSeek's expert balancing: a router bias and a small per-sequence loss.
_BALANCE = {
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
}
#: Common fields of the small models, which train on a CPU.
_TINY: dict[str, Any] = {
    "multi_latent_attention": True, "hidden_size": 128, "num_attention_heads": 8,
    "q_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "qk_layernorm": True,
    "gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "init_method_std": 0.05, "rope_type": "rope",
    "dsa_indexer_n_heads": 8, "dsa_indexer_head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "v3.2-tiny": _TINY
    | {
        "num_layers": 4, "ffn_hidden_size": 256, "kv_lora_rank": 64, "v_head_dim": 32,
        "dsa_indexer_topk": 48,
    },
    "glm-5.3-tiny": _TINY
    | _glm_5_3(layers=4, heads=4, head_dim=32)
    | {
        "num_layers": 4, "mtp_num_layers": 1, "ffn_hidden_size": 256, "kv_lora_rank": 64,
        "v_head_dim": 32, "dsa_indexer_topk": 48, "dsa_indexer_k_norm_epsilon": 1e-6,
        "num_moe_experts": 8, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 96,
        "moe_shared_expert_intermediate_size": 96, "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
        "layernorm_epsilon": 1e-5, "hc_collapse": "mean", **_CLAMPED, **_STREAMS,
    },
    "v4-tiny": _TINY
    | {
        "num_layers": 5, "mtp_num_layers": 1,
        "kv_lora_rank": 32,  # unused by DeepSeek-V4
        "v_head_dim": 48, "o_groups": 4, "o_lora_rank": 32,
        "csa_compress_ratios": [0, 4, 16, 4, 16, 0], "csa_window_size": 32,
        "csa_compress_rotary_base": 10000,
        "dsa_indexer_topk": 12, "dsa_indexer_rope_interleaved": True,
        "num_moe_experts": 8, "moe_layer_freq": 1, "moe_ffn_hidden_size": 96,
        "moe_shared_expert_intermediate_size": 96, "moe_router_topk": 2,
        "moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 1.5,
        "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32", "moe_hash_layers": 1,
        "layernorm_epsilon": 1e-6, **_CLAMPED, **_STREAMS,
    },
}  # fmt: skip
MODELS = (
    *("v3.2-tiny", "v3.2", "glm-5", "glm-5.3-tiny", "glm-5.3-flash"),
    *("v4-tiny", "v4-flash", "v4-pro"),
)


def model_flags(name: str) -> list[str]:
    """Return the flags that ``--dsa-model`` sets for one of :data:`MODELS`.

    The flags omit data, tokenizer, sequence length, schedule, precision and parallel layout. The
    tokenizer sets the vocabulary of small models.

    Raises:
        ConfigError: unknown name.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, MODELS)}")
    fields = TINY[name] if name in TINY else _released_fields(name)
    fields = fields | _INDEXER_LOSS
    if "num_moe_experts" in fields:
        fields |= _BALANCE
    if "mtp_num_layers" in fields:
        # DeepSeek lowers V4's prediction loss to 0.1 once the learning rate decays.
        fields["mtp_loss_scaling_factor"] = 0.3 if "csa_compress_ratios" in fields else 0.1
    words = [word for field, value in fields.items() for word in flag_words(field, value)]
    return words + list(ALWAYS)


def _released_fields(name: str) -> dict[str, Any]:
    fields = {"multi_latent_attention": True} | PRESETS[name] | AROUND[name]
    said = ("attention_dropout", "hidden_dropout")
    return {field: value for field, value in fields.items() if field not in said} | {
        "init_method_std": 0.02,
        "padded_vocab_size": VOCABULARY[name],
        "max_position_embeddings": _POSITIONS[name],
    }
