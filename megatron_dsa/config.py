"""Configuration: what this package adds to Megatron's MLA configuration, and model presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_dsa.dispatch import DEFAULT_WORKSPACE_BYTES, Policy
from megatron_dsa.errors import ConfigError
from megatron_dsa.spread import CP_LAYOUTS
from megatron_dsa.versions import require_supported_megatron

require_supported_megatron()

STAGES = ("dense", "warmup", "sparse")
TEACHERS = ("attention", "compressed")
TP_MODES = ("auto", "heads", "rows")
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
        health_fp8: also measure there how much of the selection fp8 index scores would find.
        evaluate_indexer: compute the indexer loss in evaluation passes, too.
        csa_teacher: what the indexer of hybrid attention learns: ``attention``, the probabilities
            of the compressed keys beside window and sink, or ``compressed``, a softmax over the
            compressed keys alone (an older reading of the model).
        cp_layout: how context parallelism spreads rows, see :data:`spread.CP_LAYOUTS`.
        tp_mode: under tensor parallelism each rank attends with its ``heads`` for all rows, or for
            its ``rows`` with all heads, or ``auto``: rows where a rank would have less than 64
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
    health_fp8: bool = False
    evaluate_indexer: bool = False
    csa_teacher: Literal["attention", "compressed"] = "attention"
    cp_layout: Literal["zigzag", "zigzag_rows", "contiguous"] = "zigzag"
    tp_mode: Literal["auto", "heads", "rows"] = "auto"
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


def options_of(config: Any) -> DSAOptions:
    """Return the :class:`DSAOptions` of any transformer configuration."""
    return getattr(config, "dsa", None) or DSAOptions()


def uses_indexer(config: Any) -> bool:
    """Whether the layers have an indexer (every stage but ``dense``)."""
    return options_of(config).stage != "dense"


def indexer_is_trained(config: Any) -> bool:
    """Whether an indexer loss is computed."""
    return uses_indexer(config) and bool(config.dsa_indexer_loss_coeff)


def by_rows(config: Any) -> bool:
    """Whether tensor-parallel ranks attend for rows of their own with all heads.

    Only selected keys make rows independent of each other's: stages with dense attention go by
    heads.
    """
    ranks, mode = config.tensor_model_parallel_size, options_of(config).tp_mode
    dense = options_of(config).stage != "sparse" and not hasattr(config, "csa_compress_ratios")
    if ranks == 1 or not config.sequence_parallel or dense or mode == "heads":
        return False
    return mode == "rows" or config.num_attention_heads // ranks < FULL_TILE


def query_heads(config: Any) -> int:
    """Return how many heads attention has on a rank."""
    return config.num_attention_heads // (
        1 if by_rows(config) else config.tensor_model_parallel_size
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


def _rules(config: Any):
    """Yield ``(ok, message)``: each message names the argument, the rule and the fix."""
    yield from attention_rules(config)
    yield from _mla_rules(config)
    yield from host_rules(config)
    if uses_indexer(config):
        yield from indexer_rules(config)


def _mla_rules(config: Any):
    """What the absorbed MLA of DSA needs."""
    local, shards = config.transformer_impl == "local", config.tensor_model_parallel_size
    latents = {
        "--q-lora-rank": config.q_lora_rank or 0,
        "--kv-lora-rank plus --qk-pos-emb-head-dim": config.kv_lora_rank
        + config.qk_pos_emb_head_dim,
    }
    for name, size in latents.items():
        yield (
            not local or size % shards == 0,
            f"{name} ({size}) must be a multiple of --tensor-model-parallel-size ({shards}) "
            "with --transformer-impl local, whose down projections are split by columns",
        )
    yield (
        config.qk_layernorm or config.q_lora_rank is None or not uses_indexer(config),
        "--qk-layernorm is required: the indexer reads the normalised query latent",
    )
    yield (
        not config.qk_layernorm or config.q_lora_rank is not None,
        "--q-lora-rank is required with --qk-layernorm: there is no query latent to normalise",
    )
    yield (
        config.qk_layernorm or options_of(config).latent_norm_epsilon is None,
        "--dsa-latent-norm-epsilon needs --qk-layernorm: without it latents are not normalised; "
        "drop one or add the other",
    )


def attention_rules(config: Any):
    """Yield what no attention of this package does."""
    yield (
        config.multi_latent_attention,
        "--multi-latent-attention is required: its configuration has the fields for this attention",
    )
    yield (
        config.experimental_attention_variant is None,
        f"--experimental-attention-variant must be unset, got "
        f"{config.experimental_attention_variant!r}: it would build Megatron's bundled attention",
    )
    yield (
        not (config.add_bias_linear or config.add_qkv_bias),
        "biases are not supported: pass --disable-bias-linear and drop --add-qkv-bias",
    )
    yield (
        not config.cache_mla_latents,
        "--cache-mla-latents is for inference, which this package does not do: drop it",
    )
    yield (
        not getattr(config, "mla_down_proj_fusion", False),
        "--mla-down-proj-fusion is not supported: the indexer reads the query latent; drop it",
    )
    yield (
        not config.qk_clip,
        "--qk-clip is not supported: the sparse kernels do not report the largest logit; drop it",
    )
    yield (
        config.softmax_type == "vanilla" and config.window_size is None,
        "--softmax-type and --window-size must keep their defaults: the selection is the mask",
    )
    yield (
        not config.log_max_attention_logit,
        "--log-max-attention-logit is not supported: the sparse kernels do not report it; drop it",
    )
    yield (
        config.attention_dropout == 0.0,
        f"--attention-dropout must be 0, got {config.attention_dropout}: sparse attention kernels "
        "have no dropout",
    )
    yield (
        config.rope_type in ("rope", "yarn"),
        f"--rope-type must be 'rope' or 'yarn', got {config.rope_type!r}",
    )


def host_rules(config: Any):
    """Yield what concerns every attention of this package: layouts, layer sets, features."""
    local = config.transformer_impl == "local"
    yield (
        not getattr(config, "hybrid_context_parallel", False),
        "--hybrid-context-parallel is not supported: drop it, every microbatch is spread alike",
    )
    exchange = config.cp_comm_type
    exchange = exchange if isinstance(exchange, list) else [exchange]
    yield (
        config.context_parallel_size == 1 or not any("a2a" in (kind or "") for kind in exchange),
        f"--cp-comm-type must be p2p or allgather, got {config.cp_comm_type}: this attention "
        "gathers keys and leaves queries where they are",
    )
    yield (
        config.context_parallel_size == 1
        or not config.mtp_num_layers
        or options_of(config).cp_layout != "contiguous",
        "--dsa-cp-layout must not be contiguous with --mtp-num-layers: Megatron shifts labels of "
        "multi-token prediction as if every sequence lay in zigzag order; use zigzag",
    )
    yield (
        config.tensor_model_parallel_size == 1 or config.sequence_parallel,
        "--sequence-parallel is required with --tensor-model-parallel-size > 1: without it the "
        "gradients of the latent norms are counted once per rank",
    )
    yield (
        config.num_attention_heads % config.tensor_model_parallel_size == 0,
        f"--num-attention-heads ({config.num_attention_heads}) must be a multiple of "
        f"--tensor-model-parallel-size ({config.tensor_model_parallel_size})",
    )
    yield (
        not config.overlap_moe_expert_parallel_comm and not config.delay_wgrad_compute,
        "--overlap-moe-expert-parallel-comm and --delay-wgrad-compute are not supported yet: "
        "drop them",
    )
    yield (
        config.cuda_graph_impl == "none",
        f"--cuda-graph-impl must be none, got {config.cuda_graph_impl}: not supported yet",
    )
    yield (
        not (local and config.layernorm_zero_centered_gamma),
        "--apply-layernorm-1p needs --transformer-impl transformer_engine",
    )
    yield (
        not (local and config.fp32_residual_connection and config.params_dtype != torch.float32),
        "--fp32-residual-connection needs --transformer-impl transformer_engine: torch's norms do "
        "not mix dtypes",
    )
    yield (
        not (local and "layernorm" in (config.recompute_modules or ())),
        "--recompute-modules layernorm needs transformer-engine: megatron-core 0.19's recompute of "
        "norms fails without it; drop it",
    )
    yield (
        not config.fp8_param,
        "--fp8-param-gather is not supported: absorption reads the up-projection weight in bf16",
    )


def indexer_rules(config: Any):
    """What the indexer needs to be given."""
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        value = getattr(config, name)
        yield (
            isinstance(value, int) and value >= 1,
            f"--{name.replace('_', '-')} must be a positive integer in stage "
            f"'{options_of(config).stage}', got {value}",
        )
    head_dim = config.dsa_indexer_head_dim or 0
    yield (
        head_dim >= config.qk_pos_emb_head_dim,
        f"--dsa-indexer-head-dim ({head_dim}) must be at least --qk-pos-emb-head-dim "
        f"({config.qk_pos_emb_head_dim}): rope is applied to that many of its dims",
    )
    yield (
        not config.dsa_indexer_rotate_activation or head_dim & (head_dim - 1) == 0,
        f"--dsa-indexer-head-dim must be a power of two for the Hadamard rotation, got {head_dim}; "
        "or pass --no-dsa-indexer-rotate-activation",
    )
    yield (
        config.dsa_indexer_topk_freq >= 1 and config.dsa_indexer_skip_topk_offset >= 0,
        "--dsa-indexer-topk-freq must be >= 1 and --dsa-indexer-skip-topk-offset >= 0, got "
        f"{config.dsa_indexer_topk_freq} and {config.dsa_indexer_skip_topk_offset}",
    )
    yield (
        options_of(config).stage != "warmup" or bool(config.dsa_indexer_loss_coeff),
        "--dsa-indexer-loss-coeff must be positive in stage 'warmup': the loss is what trains "
        "the indexer",
    )


def validate(config: Any) -> None:
    """Raise :class:`ConfigError` for everything that this package does not support.

    Called when the configuration or a layer is built: nothing of this is left to the first step.
    """
    # Hybrid attention brings its own rules (csa_config.py).
    rules = config.rules() if hasattr(config, "rules") else _rules(config)
    problems = [message for ok, message in rules if not ok]
    if problems:
        raise ConfigError("unsupported configuration:\n" + "\n".join(f"  - {p}" for p in problems))
