"""Configuration of DeepSeek-V4's hybrid attention: what it adds to Megatron's MLA configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_dsa.config import (
    DSAOptions,
    DSATransformerConfig,
    options_of,
    uses_indexer,
    validate,
)
from megatron_dsa.config_rules import attention_rules, host_rules, indexer_rules
from megatron_dsa.errors import ConfigError

#: Compression ratio of the layers that select among their compressed keys (CSA). Groups overlap.
CSA_RATIO = 4


@dataclass
class HybridTransformerConfig(DSATransformerConfig):
    """Megatron's MLA configuration for layers of window, CSA and HCA attention (DeepSeek-V4).

    The one key/value head has ``v_head_dim`` dims, of which the last ``qk_pos_emb_head_dim`` are
    rotated; ``kv_lora_rank`` has no meaning. Names are those of Megatron's development branch.

    Attributes:
        csa_compress_ratios: one per layer, those of multi-token prediction last. 0: window only;
            4: CSA, window and selected compressed keys; more: HCA, window and all compressed keys.
        csa_window_size: latest positions that every query sees, its own included.
        csa_dense_mode: CSA layers attend to all visible compressed keys and have no indexer, as in
            ``--dsa-stage dense``.
        csa_compress_rotary_base: rotary base of layers with compression; YaRN
            (``rope_type="yarn"``) applies to them alone. ``rotary_base`` is that of the others.
        o_groups, o_lora_rank: groups of heads with a low-rank output projection each, and its rank.
    """

    csa_compress_ratios: list[int] | None = None
    csa_window_size: int = 128
    csa_dense_mode: bool = False
    csa_compress_rotary_base: float | None = None
    o_groups: int = 8
    o_lora_rank: int = 1024

    def __post_init__(self):
        self._join_stages()
        super().__post_init__()

    @classmethod
    def from_mla(
        cls, config: MLATransformerConfig, options: DSAOptions, **hybrid: Any
    ) -> HybridTransformerConfig:
        """Return a finished MLA configuration as this class; ``hybrid`` has the fields above."""
        ours = cls.__new__(cls)
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                setattr(ours, field.name, field.default)
        ours.__dict__.update(config.__dict__)
        ours.__dict__.update(hybrid, dsa=options)
        ours._join_stages()
        validate(ours)
        return ours

    def _join_stages(self) -> None:
        if self.csa_dense_mode and self.dsa.stage == "warmup":
            raise ConfigError(
                "--csa-dense-mode has no indexer that --dsa-stage warmup could train: drop one"
            )
        if self.csa_dense_mode:
            self.dsa = dataclasses.replace(self.dsa, stage="dense")
        if self.csa_compress_ratios is not None:
            self.csa_compress_ratios = [int(ratio) for ratio in self.csa_compress_ratios]
            # Layers of different kinds cannot be stacked in one checkpoint tensor.
            self.hetereogenous_dist_checkpoint = True

    @property
    def head_dim(self) -> int:
        """Dims of a query head and of the key/value head."""
        return self.v_head_dim

    def ratio(self, layer_number: int, is_mtp: bool = False) -> int:
        """Return the compression ratio of a layer (numbered from 1)."""
        return self.csa_compress_ratios[layer_number - 1 + (self.num_layers if is_mtp else 0)]

    def rules(self):
        """Yield ``(ok, message)`` as :func:`megatron_dsa.config.validate` wants them."""
        yield from _pattern_rules(self)
        yield from _shape_rules(self)
        yield from attention_rules(self)
        yield from host_rules(self, options_of(self))
        if options_of(self).stage != "dense":
            yield from _indexer_rules(self)


def _pattern_rules(config: HybridTransformerConfig):
    ratios = config.csa_compress_ratios
    layers = config.num_layers + (config.mtp_num_layers or 0)
    yield (
        ratios is not None and len(ratios) == layers,
        "--csa-compress-ratios must hold one ratio per layer, multi-token prediction included "
        f"({layers}), got {ratios if ratios is None else len(ratios)}",
    )
    bad = [ratio for ratio in ratios or () if ratio < 0 or ratio == 1]
    yield (not bad, f"--csa-compress-ratios must be 0 or at least 2, got {bad[:1]}")
    yield (
        config.csa_window_size >= 1,
        f"--csa-window-size must be at least 1, got {config.csa_window_size}",
    )
    compresses = any(ratios or ())
    yield (
        not compresses or (config.csa_compress_rotary_base or 0) > 0,
        "--csa-compress-rotary-base is required with compressed layers: public sources disagree on "
        "it, take it from the model's own configuration",
    )


def _shape_rules(config: HybridTransformerConfig):
    rope = config.qk_pos_emb_head_dim
    yield (
        config.qk_head_dim + rope == config.v_head_dim,
        f"--v-head-dim ({config.v_head_dim}) must be --qk-head-dim ({config.qk_head_dim}) plus "
        f"--qk-pos-emb-head-dim ({rope}): the key is the value",
    )
    yield (rope % 2 == 0, f"--qk-pos-emb-head-dim must be even, got {rope}")
    yield (
        config.q_lora_rank is not None and config.qk_layernorm,
        "--q-lora-rank and --qk-layernorm are required: queries come from a normalised latent",
    )
    yield (
        config.normalization == "RMSNorm",
        f"--normalization must be RMSNorm, got {config.normalization}",
    )
    yield (
        config.o_groups >= 1 and config.num_attention_heads % config.o_groups == 0,
        f"--o-groups ({config.o_groups}) must divide --num-attention-heads "
        f"({config.num_attention_heads})",
    )
    yield (
        config.o_groups % config.tensor_model_parallel_size == 0,
        f"--o-groups ({config.o_groups}) must be a multiple of --tensor-model-parallel-size "
        f"({config.tensor_model_parallel_size}): a group's heads stay on one rank",
    )
    yield (
        options_of(config).latent_norm_epsilon is None,
        "--dsa-latent-norm-epsilon: V4's norms all have that of --norm-epsilon, drop it",
    )
    yield (
        config.mscale == 1.0 and config.mscale_all_dim == 0.0 and config.rotary_percent == 1.0,
        "--mscale, --mscale-all-dim and --rotary-percent must keep their defaults: V4's rope has "
        "no concentration factor and rotates all of --qk-pos-emb-head-dim",
    )
    yield (
        config.dsa_indexer_k_norm_epsilon is None and not config.dsa_indexer_k_norm_fp32,
        "--dsa-indexer-k-norm-epsilon and --dsa-indexer-k-norm-fp32 have no meaning: the keys of "
        "V4's indexer are normalised by its compressor; drop them",
    )
    yield (
        config.dsa_indexer_topk_freq == 1,
        "--dsa-indexer-topk-freq must be 1: V4's layers do not share selections",
    )


def _indexer_rules(config: HybridTransformerConfig):
    if CSA_RATIO not in (config.csa_compress_ratios or ()):
        return
    yield from indexer_rules(config, options_of(config))
    yield (
        config.dsa_indexer_rope_interleaved,
        "--dsa-indexer-rope-interleaved is required: V4's indexer pairs neighbouring dims",
    )


def is_hybrid(config: Any) -> bool:
    """Whether the layers are V4's hybrid attention."""
    return getattr(config, "csa_compress_ratios", None) is not None


def has_indexers(config: Any) -> bool:
    """Whether any layer of the model has an indexer."""
    if not uses_indexer(config):
        return False
    return not is_hybrid(config) or CSA_RATIO in config.csa_compress_ratios


def _v4(layers: int, hidden: int, heads: int, q_lora: int, groups: int, topk: int, first: int):
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "mtp_num_layers": 1,
        "csa_compress_ratios": [first, first, 4] + [128, 4] * ((layers - 3) // 2) + [0],
        "csa_window_size": 128,
        "q_lora_rank": q_lora,
        "kv_lora_rank": 448,  # not used; what Megatron's development branch writes there
        "qk_head_dim": 448,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 512,
        "o_groups": groups,
        "o_lora_rank": 1024,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "dsa_indexer_n_heads": 64,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": topk,
        "dsa_indexer_rope_interleaved": True,
    }


#: Attention shapes of released models; see :func:`csa_preset`.
CSA_PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": _v4(43, 4096, 64, 1024, 8, 512, first=0),
    "deepseek-v4-pro": _v4(61, 7168, 128, 1536, 16, 1024, first=128),
}


def csa_preset(name: str, **changes: Any) -> HybridTransformerConfig:
    """Return the configuration of a released model, with ``changes`` on top.

    Rope bases, YaRN's factor and its original length are not part of a preset, because public
    sources disagree: ``rotary_base``, ``csa_compress_rotary_base``, ``rotary_scaling_factor`` and
    ``original_max_position_embeddings`` have to be given.

    Raises:
        ConfigError: for an unknown name or field, or without one of those four.
    """
    if name not in CSA_PRESETS:
        raise ConfigError(f"unknown preset {name!r}; available: {', '.join(sorted(CSA_PRESETS))}")
    known = {field.name for field in dataclasses.fields(HybridTransformerConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"preset {name!r}: no such configuration field: {', '.join(unknown)}")
    needed = (
        "rotary_base",
        "csa_compress_rotary_base",
        "rotary_scaling_factor",
        "original_max_position_embeddings",
    )
    missing = [field for field in needed if field not in changes]
    if missing:
        raise ConfigError(
            f"preset {name!r} needs {', '.join(missing)}: take them from the model's own "
            "configuration (rope_theta, compress_rope_theta, rope_scaling)"
        )
    return HybridTransformerConfig(**CSA_PRESETS[name] | changes)
