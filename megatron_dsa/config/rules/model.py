"""Rules of models: attention, indexer, layouts and layer sets."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.rules.cuda_graphs import graph_rules
from megatron_dsa.config.rules.numerics import cache_rules, numerics_rules
from megatron_dsa.config.rules.sizes import expert_rules, size_rules
from megatron_dsa.config.rules.table import Must, check_rows

_ONE_MASK = "the selection is the mask"
_KITCHEN = "--transformer-impl chooses the layers"
#: Rules of every attention of this package.
ATTENTION = (
    Must("cache_mla_latents", False, "it is for inference, which this package does not do"),
    Must("mla_down_proj_fusion", False, "the indexer reads the query latent"),
    Must("qk_clip", False, "the sparse kernels do not report the largest logit"),
    Must("log_max_attention_logit", False, "the sparse kernels do not report it"),
    Must("no_rope_freq", False, "every layer of this attention has rope"),
    Must("qk_l2_norm", False, "MLA normalises its latents (--qk-layernorm)"),
    Must("batch_invariant_mode", False, "kernels of sparse attention do not promise it"),
    Must("use_transformer_engine_op_fuser", False, "it would have no effect on these layers"),
    Must("hybrid_context_parallel", False, "every microbatch is divided alike"),
    Must("multi_latent_attention", True, "its configuration has the fields for this attention"),
    Must("experimental_attention_variant", None, "it would build Megatron's bundled attention"),
    Must(
        "add_bias_linear", False, "no released model has one; pass --disable-bias-linear",
        "a bias of linears",
    ),
    Must("add_qkv_bias", False, "no released model has one"),
    Must("softmax_type", "vanilla", _ONE_MASK),
    Must("window_size", None, _ONE_MASK),
    Must("window_attn_skip_freq", None, _ONE_MASK),
    Must(
        "softmax_scale", None, "the softmax scale is that of MLA's head dims",
        "--use-mup (or softmax_scale)",
    ),
    Must("linear_attention_freq", None, "every layer has the attention of this package"),
    Must(
        "is_hybrid_model", False, "every layer has the attention of this package",
        "--hybrid-layer-pattern",
    ),
    Must(
        "dsa_kernel_backend", "none", "it chooses kernels of Megatron's bundled DSA; name kernels "
        "of this package by operation (--dsa-impl, docs/guide/flags.md)",
    ),
    Must(
        "fp8_dot_product_attention", False, "attention runs in --bf16; set it to False",
        "fp8_dot_product_attention",
    ),
    Must(
        "fp8_multi_head_attention", False, "attention runs in --bf16; set it to False",
        "fp8_multi_head_attention",
    ),
    Must("use_kitchen", False, _KITCHEN, "--kitchen-config-file or --kitchen-recipe-number"),
    Must("use_kitchen_attention", False, _KITCHEN),
    Must("attention_dropout", 0, "sparse attention kernels have no dropout"),
    Must("rope_type", ("rope", "yarn"), "layers have no other rope"),
    Must("fp4_param", False, "it was never run with this attention"),
    Must(
        "gtp_weight_remat_size", 1,
        "absorption reads the whole up-projection weight of a rank's heads; drop it",
    ),
)  # fmt: skip
#: Rules of MLA's layer sets without transformer-engine.
_LOCAL_LAYERS = (
    ("fp8", "torch's linears would silently use --bf16"),
    ("fp4", "torch's linears would silently use --bf16"),
    ("quant_recipe", "torch's linears do not read it"),
    ("layernorm_zero_centered_gamma", "torch's norms ignore it"),
)


def is_v4(config: Any) -> bool:
    """Return whether the layers are V4's attention."""
    return getattr(config, "csa_compress_ratios", None) is not None


def recomputes(config: Any, module: str) -> bool:
    """Return whether ``--recompute-modules`` names a module."""
    return module in (config.recompute_modules or ())


def dsa_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield every rule for a model with DSA layers."""
    yield from attention_rules(config)
    yield from _mla_rules(config, options)
    yield from host_rules(config, options)
    if options.stage != "dense":
        yield from indexer_rules(config, options)


def _mla_rules(config: Any, options: Any):
    local, shards = config.transformer_impl == "local", config.tensor_model_parallel_size
    kv = config.kv_lora_rank + config.qk_pos_emb_head_dim
    for name, size in (
        ("--q-lora-rank", config.q_lora_rank or 0),
        ("--kv-lora-rank plus --qk-pos-emb-head-dim", kv),
    ):
        yield (
            not local or size % shards == 0,
            f"{name} ({size}) must be a multiple of --tensor-model-parallel-size ({shards}) "
            "with --transformer-impl local, whose down projections are split by columns",
        )
    yield (
        config.qk_layernorm or config.q_lora_rank is None or options.stage == "dense",
        "--qk-layernorm is required: the indexer reads the normalised query latent",
    )
    yield (
        not config.qk_layernorm or config.q_lora_rank is not None,
        "--q-lora-rank is required with --qk-layernorm: there is no query latent to normalise",
    )
    yield (
        config.qk_layernorm or options.latent_norm_epsilon is None,
        "--dsa-latent-norm-epsilon needs --qk-layernorm: without it latents are not normalised; "
        "drop one or add the other",
    )


def attention_rules(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield rules for features that no attention of this package has."""
    yield from check_rows(ATTENTION, config)
    yield (
        config.rotary_percent == 1.0 or config.rope_type == "rope",
        f"--rotary-percent must be 1 with --rope-type yarn, got {config.rotary_percent}: YaRN "
        "rotates all of --qk-pos-emb-head-dim",
    )
    yield (
        config.num_query_groups in (None, config.num_attention_heads),
        f"--num-query-groups must be unset, got {config.num_query_groups}: all query heads share "
        "the latent key; drop it",
    )
    offloaded = {"qkv_linear", "core_attn", "attn_proj"} & set(config.offload_modules or ())
    yield (
        not (config.fine_grained_activation_offloading and offloaded),
        f"--offload-modules must not name {', '.join(sorted(offloaded))}: activations of this "
        "attention are not offloaded",
    )
    yield from size_rules(config)
    yield from expert_rules(config)


def _precision_rules(config: Any):
    if config.transformer_impl == "local":
        norms = recomputes(config, "layernorm")
        given = [(flag_of(name), getattr(config, name), why) for name, why in _LOCAL_LAYERS]
        given += [
            ("--recompute-modules layernorm", norms, "megatron-core 0.19 cannot recompute torch's")
        ]
        for flag, value, why in given:
            yield not value, f"{flag} needs --transformer-impl transformer_engine: {why}; drop it"
    yield (
        not config.fp32_residual_connection or config.params_dtype == torch.float32,
        "--fp32-residual-connection is not supported: neither torch's norms nor "
        "transformer-engine's take fp32 beside weights of 16 bits; drop it",
    )


def _fp8_indexer_rules(config: Any, options: Any):
    if not options.fp8_indexer:
        return
    yield (
        config.fp8,
        "--dsa-fp8-indexer has a meaning only with --fp8-format: add that or drop it",
    )
    unit = 32 if config.fp8_recipe == "mxfp8" else 8
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim"):
        size = getattr(config, name) or 0
        yield (
            size % unit == 0,
            f"{flag_of(name)} must be a multiple of {unit} with --dsa-fp8-indexer, got {size}: "
            "transformer-engine quantises weights with so many rows only. Drop --dsa-fp8-indexer, "
            "and the indexer runs in --bf16",
        )
    recomputed = config.recompute_granularity == "selective" and recomputes(config, "core_attn")
    yield (
        not (recomputed and is_v4(config)),
        "--dsa-fp8-indexer is not supported with --recompute-modules core_attn and "
        "--csa-compress-ratios: V4's indexer would be computed again in bf16, and select other "
        "keys; drop one of them",
    )


def _overlap_rules(config: Any, options: Any):
    """Megatron itself refuses more, and delayed weight gradients without this schedule."""
    if not config.overlap_moe_expert_parallel_comm:
        return
    flag, fix = "--overlap-moe-expert-parallel-comm must not be used", "drop one of them"
    freq, impl = config.dsa_indexer_topk_freq, config.cuda_graph_impl
    yield (
        getattr(config, "hc_mult", 1) == 1,
        f"{flag} with --hc-mult above 1: Megatron's schedule adds experts to one residual; {fix}",
    )
    yield (
        options.stage != "sparse" or freq == 1,
        f"{flag} with --dsa-indexer-topk-freq {freq}: Megatron's schedule hands only hidden states "
        f"from layer to layer, and layers that reuse a selection need it; {fix}",
    )
    yield (
        impl == "none",
        f"{flag} with --cuda-graph-impl {impl}: the two were not run together; {fix}",
    )
    yield (
        options.stage != "warmup" or not options.freeze_main,
        f"{flag} in a frozen warm-up: Megatron's schedule starts the backward pass from the "
        "language model's loss, which then has no gradient; drop it, or add "
        "--dsa-warmup-train-all",
    )


def host_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield what concerns every attention of this package: layouts, layer sets, features."""
    several = config.context_parallel_size > 1
    yield (
        # A string, or one per layer.
        not several or "a2a" not in str(config.cp_comm_type),
        f"--cp-comm-type must be p2p or allgather, got {config.cp_comm_type}: this attention "
        "gathers keys and leaves queries where they are",
    )
    yield (
        not (several and config.mtp_num_layers and options.cp_layout == "contiguous"),
        "--dsa-cp-layout must not be contiguous with --mtp-num-layers: Megatron shifts labels of "
        "multi-token prediction as if every sequence lay in zigzag order; use zigzag",
    )
    yield (
        config.tensor_model_parallel_size == 1 or config.sequence_parallel,
        "--sequence-parallel is required with --tensor-model-parallel-size > 1: without it the "
        "gradients of the latent norms are counted once per rank",
    )
    yield from _overlap_rules(config, options)
    yield from graph_rules(config, options)
    yield from _precision_rules(config)
    yield from _fp8_indexer_rules(config, options)
    yield from cache_rules(config, options)


def masked_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield where masked dense attention cannot be asked for."""
    if options.selected_attention != "masked" or options.stage != "sparse":
        return
    flag = "--dsa-selected-attention must not be masked"
    yield (
        options.recompute == "nothing",
        f"{flag} with --dsa-recompute {options.recompute}: masked attention has no output in the "
        "space of the latents; drop one of the two",
    )
    yield (
        not is_v4(config),
        f"{flag} with --csa-compress-ratios: V4's layers attend to lists of window and compressed "
        "keys; drop it",
    )
    yield (
        config.tensor_model_parallel_size == 1 or options.tp_mode != "sequence",
        f"{flag} where tensor-parallel ranks attend by sequence (--dsa-tp-mode sequence): a rank "
        "expands the keys of its own heads only; add --dsa-tp-mode heads or select, or use auto or "
        "sparse",
    )


def tp_mode_rules(config: Any, options: Any, dense_loss: bool) -> Iterator[tuple[Any, str]]:
    """Yield where tensor-parallel ranks cannot select by sequence and attend by heads."""
    if options.tp_mode != "select" or config.tensor_model_parallel_size == 1:
        return
    flag = "--dsa-tp-mode must not be select"
    if is_v4(config):
        yield (
            False,
            f"{flag} with --csa-compress-ratios: V4's layers attend to lists of keys; use auto, "
            "heads or sequence",
        )
    elif options.stage == "sparse":
        attention = options.selected_attention
        yield (
            attention == "masked",
            f"{flag} without masked dense attention, got --dsa-selected-attention {attention}: "
            "sparse attention goes by heads or by sequence; add --dsa-selected-attention masked, "
            "or use auto, which selects like this where attention is masked",
        )
        yield (
            not dense_loss,
            f"{flag} with an indexer loss over all visible keys: its teacher needs the queries of "
            "all heads; add --dsa-indexer-use-sparse-loss, or --dsa-tp-mode heads",
        )


def indexer_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield rules for the indexer's settings."""
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        value = getattr(config, name)
        yield (
            isinstance(value, int) and value >= 1,
            f"{flag_of(name)} must be a positive integer in stage '{options.stage}', got {value}",
        )
    head_dim = config.dsa_indexer_head_dim or 0
    yield (
        head_dim >= config.qk_pos_emb_head_dim,
        f"--dsa-indexer-head-dim ({head_dim}) must be at least --qk-pos-emb-head-dim "
        f"({config.qk_pos_emb_head_dim}): rope is applied to that many of its dims",
    )
    yield (
        head_dim % 2 == 0,
        f"--dsa-indexer-head-dim must be even, got {head_dim}: rope rotates pairs of its dims",
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
    yield from numerics_rules(config, options)
    yield from _loss_rules(config.dsa_indexer_loss_coeff, options.stage)


def _loss_rules(coefficient: float | None, stage: str):
    yield (
        stage != "warmup" or bool(coefficient),
        "--dsa-indexer-loss-coeff must be positive in stage 'warmup': the loss is what trains "
        "the indexer",
    )
    yield (
        stage == "warmup" or coefficient is not None,
        f"--dsa-indexer-loss-coeff is required in stage '{stage}': without a loss the indexer "
        "stays as it is, random if no checkpoint has it; pass 1.0 to train it, or 0 to freeze it "
        "on purpose",
    )
    yield (
        coefficient is None or 0 <= coefficient < math.inf,
        f"--dsa-indexer-loss-coeff must be 0 or more, got {coefficient}: a negative one trains "
        "the indexer away from its teacher",
    )
