"""Configuration: what this package adds to Megatron's MLA configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_dsa.config_rules import CSA_RATIO, csa_rules, dsa_rules
from megatron_dsa.dispatch import DEFAULT_WORKSPACE_BYTES, Policy
from megatron_dsa.errors import ConfigError
from megatron_dsa.sequence.sharding import CP_LAYOUTS
from megatron_dsa.versions import require_supported_megatron

require_supported_megatron()

STAGES = ("dense", "warmup", "sparse")
TEACHERS = ("attention", "compressed")
TP_MODES = ("auto", "heads", "sequence")
CP_EXCHANGES = ("auto", "latents", "keys")
#: Heads that fill the tiles of the attention kernels.
FULL_TILE = 64


@dataclass(frozen=True)
class DSAOptions:
    """Settings that Megatron's own configuration has no field for.

    They travel as the attribute ``dsa`` of the transformer configuration; a configuration without
    it (somebody else's training script) gets the defaults.

    Attributes:
        stage: ``dense`` (plain MLA, no indexer), ``warmup`` (dense attention, dense indexer loss)
            or ``sparse`` (top-k attention).
        freeze_main: in ``warmup``, train the indexer alone.
        fused: prefer fused implementations (``--attention-backend dsa_fused``).
        strict: refuse to run an operation unfused (``--dsa-strict``).
        workspace_bytes: budget for temporary memory of the implementations that need much.
        health_rows: query rows per layer on which the health figures are measured, once per
            iteration; 0 switches them off.
        evaluate_indexer: compute the indexer loss in evaluation passes, too.
        csa_teacher: what the indexer of hybrid attention learns: ``attention``, the probabilities
            of the compressed keys beside window and sink, or ``compressed``, a softmax over the
            compressed keys alone (an older reading of the model).
        cp_layout: how context parallelism shards rows, see
            :data:`.sequence.sharding.CP_LAYOUTS`.
        tp_mode: under tensor parallelism each rank attends with its ``heads`` for all rows, or for
            its part of the ``sequence`` with all heads, or
            ``auto``: the latter where a rank would have less than 64
            heads, which leave a GPU's tile empty.
        cp_exchange: what context-parallel ranks exchange in the dense stages: MLA's ``latents``,
            gathered, or the ``keys`` and values of the heads, round a ring; ``auto``: the narrower.
        fp8_selection: select keys by fp8 scores and score the best of them again.
        latent_norm_epsilon: of the norms of MLA's latents; ``None``: that of all norms.
        named: pairs ``(operation, implementation)`` that must run or raise.
    """

    stage: Literal["dense", "warmup", "sparse"] = "sparse"
    freeze_main: bool = True
    fused: bool = True
    strict: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    health_rows: int = 16
    evaluate_indexer: bool = False
    csa_teacher: Literal["attention", "compressed"] = "attention"
    cp_layout: Literal["zigzag", "zigzag_rows", "contiguous"] = "zigzag"
    tp_mode: Literal["auto", "heads", "sequence"] = "auto"
    cp_exchange: Literal["auto", "latents", "keys"] = "auto"
    fp8_selection: bool = False
    latent_norm_epsilon: float | None = None
    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ConfigError(f"--dsa-stage must be one of {', '.join(STAGES)}, got {self.stage!r}")
        if self.workspace_bytes < 2**20:
            raise ConfigError(
                f"--dsa-workspace-mib must be at least 1, got {self.workspace_bytes / 2**20:g}"
            )
        if self.csa_teacher not in TEACHERS:
            raise ConfigError(
                f"--dsa-csa-teacher must be one of {', '.join(TEACHERS)}, got {self.csa_teacher!r}"
            )
        if self.cp_layout not in CP_LAYOUTS:
            raise ConfigError(
                f"--dsa-cp-layout must be one of {', '.join(CP_LAYOUTS)}, got {self.cp_layout!r}"
            )
        if self.tp_mode not in TP_MODES:
            raise ConfigError(
                f"--dsa-tp-mode must be one of {', '.join(TP_MODES)}, got {self.tp_mode!r}"
            )
        if self.cp_exchange not in CP_EXCHANGES:
            raise ConfigError(
                f"--dsa-cp-exchange must be one of {', '.join(CP_EXCHANGES)}, got "
                f"{self.cp_exchange!r}"
            )
        if self.latent_norm_epsilon is not None and self.latent_norm_epsilon <= 0:
            raise ConfigError(
                f"--dsa-latent-norm-epsilon must be positive, got {self.latent_norm_epsilon}"
            )
        if self.health_rows < 0:
            raise ConfigError(f"--dsa-health-rows must be 0 or more, got {self.health_rows}")
        # Configuration files give lists back, and dispatch looks its choices up by these.
        object.__setattr__(self, "named", tuple(tuple(pair) for pair in self.named))

    @property
    def policy(self) -> Policy:
        """What dispatch needs to know."""
        return Policy(self.fused, self.strict, self.workspace_bytes, self.named, self.fp8_selection)


@dataclass
class DSATransformerConfig(MLATransformerConfig):
    """Megatron's MLA configuration plus :class:`DSAOptions`, validated for sparse attention."""

    dsa: DSAOptions = field(default_factory=DSAOptions)

    def __post_init__(self):
        super().__post_init__()
        validate(self)

    @classmethod
    def from_mla(cls, config: MLATransformerConfig, options: DSAOptions) -> DSATransformerConfig:
        """Return ``config`` as this class.

        Megatron's ``__post_init__`` rewrites fields and may not run twice, so the finished fields
        are taken over as they are.
        """
        ours = cls.__new__(cls)
        ours.__dict__.update(config.__dict__)
        ours.dsa = options
        validate(ours)
        return ours


@dataclass
class CSATransformerConfig(DSATransformerConfig):
    """Megatron's MLA configuration for layers of window, CSA and HCA attention (DeepSeek-V4).

    The one key/value head has ``v_head_dim`` dims, of which the last ``qk_pos_emb_head_dim`` are
    rotated; ``kv_lora_rank`` has no meaning. Names are those of Megatron's development branch.

    Attributes:
        csa_compress_ratios: one per layer, those of multi-token prediction last. 0: window only;
            4: CSA, window and selected compressed keys; more: HCA, window and all compressed keys.
        csa_window_size: latest positions that every query sees, its own included.
        csa_compress_rotary_base: rotary base of layers with compression; YaRN
            (``rope_type="yarn"``) applies to them alone. ``rotary_base`` is that of the others.
        o_groups, o_lora_rank: groups of heads with a low-rank output projection each, and its rank.
    """

    csa_compress_ratios: list[int] | None = None
    csa_window_size: int = 128
    csa_compress_rotary_base: float | None = None
    o_groups: int = 8
    o_lora_rank: int = 1024

    def __post_init__(self):
        self._set_ratios()
        super().__post_init__()

    @classmethod
    def from_mla(
        cls, config: MLATransformerConfig, options: DSAOptions, **hybrid: Any
    ) -> CSATransformerConfig:
        """Return a finished MLA configuration as this class; ``hybrid`` has the fields above."""
        ours = cls.__new__(cls)
        for each in dataclasses.fields(cls):
            if each.default is not dataclasses.MISSING:
                setattr(ours, each.name, each.default)
        ours.__dict__.update(config.__dict__)
        ours.__dict__.update(hybrid, dsa=options)
        ours._set_ratios()
        validate(ours)
        return ours

    def _set_ratios(self) -> None:
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


def options_of(config: Any) -> DSAOptions:
    """Return the :class:`DSAOptions` of any transformer configuration."""
    return getattr(config, "dsa", None) or DSAOptions()


def uses_indexer(config: Any) -> bool:
    """Whether the layers have an indexer (every stage but ``dense``)."""
    return options_of(config).stage != "dense"


def uses_csa(config: Any) -> bool:
    """Whether the layers are V4's hybrid attention."""
    return getattr(config, "csa_compress_ratios", None) is not None


def has_indexers(config: Any) -> bool:
    """Whether any layer of the model has an indexer."""
    if not uses_indexer(config):
        return False
    return not uses_csa(config) or CSA_RATIO in config.csa_compress_ratios


def indexer_is_trained(config: Any) -> bool:
    """Whether an indexer loss is computed."""
    return uses_indexer(config) and bool(config.dsa_indexer_loss_coeff)


def loss_is_sparse(config: Any) -> bool:
    """Whether an indexer's loss is taken over the selected keys only."""
    return options_of(config).stage == "sparse" and config.dsa_indexer_use_sparse_loss


def by_sequence(config: Any) -> bool:
    """Whether tensor-parallel ranks attend for rows of their own with all heads.

    Only selected keys make rows independent of each other's: stages with dense attention go by
    heads.
    """
    ranks, mode = config.tensor_model_parallel_size, options_of(config).tp_mode
    dense = options_of(config).stage != "sparse" and not hasattr(config, "csa_compress_ratios")
    if ranks == 1 or not config.sequence_parallel or dense or mode == "heads":
        return False
    return mode == "sequence" or config.num_attention_heads // ranks < FULL_TILE


def query_heads(config: Any) -> int:
    """Return how many heads attention has on a rank."""
    return config.num_attention_heads // (
        1 if by_sequence(config) else config.tensor_model_parallel_size
    )


def exchanges_latents(config: Any) -> bool:
    """Whether context-parallel ranks exchange MLA's latents in a dense stage.

    Otherwise the keys and values of the local heads go round a ring. A latent is gathered once and
    expanded on every rank, which costs less than sending what it expands to wherever it is
    narrower: from two local heads on in DeepSeek's shapes.
    """
    options = options_of(config)
    if config.context_parallel_size == 1 or options.stage == "sparse":
        return False
    if options.cp_exchange != "auto":
        return options.cp_exchange == "latents"
    rope = config.qk_pos_emb_head_dim
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    expanded = heads * (config.qk_head_dim + rope + config.v_head_dim)
    return config.kv_lora_rank + rope < expanded


def computes_topk(config: Any, layer_number: int) -> bool:
    """Whether layer ``layer_number`` (from 1) selects keys itself or reuses an earlier selection.

    ``dsa_indexer_skip_topk_offset`` leading layers compute; from then on, one in
    ``dsa_indexer_topk_freq`` does.
    """
    first = max(config.dsa_indexer_skip_topk_offset, 1)
    return layer_number <= first or (layer_number - first) % config.dsa_indexer_topk_freq == 0


def shares_indices(config: Any) -> bool:
    """Whether some layers reuse the selection of an earlier layer."""
    return options_of(config).stage == "sparse" and config.dsa_indexer_topk_freq > 1


def is_moe_layer(config: Any, index: int) -> bool:
    """Whether decoder layer ``index`` (from 0) has experts instead of a dense MLP."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def validate(config: Any) -> None:
    """Raise :class:`ConfigError` for everything that this package does not support.

    Called when the configuration or a layer is built: nothing of this is left to the first step.
    """
    rules = (csa_rules if uses_csa(config) else dsa_rules)(config, options_of(config))
    complaints = [message for ok, message in rules if not ok]
    if complaints:
        raise ConfigError(
            "unsupported configuration:\n" + "\n".join(f"  - {p}" for p in complaints)
        )


def is_indexer_parameter(name: str) -> bool:
    """Whether a parameter (or checkpoint key) belongs to an indexer."""
    return ".indexer." in name


def trains_main(config) -> bool:
    """Whether anything but the indexers is trained."""
    options = options_of(config)
    return options.stage != "warmup" or not options.freeze_main
