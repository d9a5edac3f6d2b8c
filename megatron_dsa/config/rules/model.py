"""Rules of models: attention, indexer, layouts and layer sets."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.config.rules.cuda_graphs import graph_rules
from megatron_dsa.config.rules.experts import expert_rules
from megatron_dsa.config.rules.numerics import cache_rules, numerics_rules
from megatron_dsa.config.rules.overlap import overlap_rules
from megatron_dsa.config.rules.sizes import size_rules

#: Megatron's flags that are refused in every case, and why. The field has the name of the flag.
UNSUPPORTED = {
    "--cache-mla-latents": "it is for inference, which this package does not do",
    "--mla-down-proj-fusion": "the indexer reads the query latent",
    "--qk-clip": "the sparse kernels do not report the largest logit",
    "--log-max-attention-logit": "the sparse kernels do not report it",
    "--no-rope-freq": "every layer of this attention has rope",
    "--qk-l2-norm": "MLA normalises its latents (--qk-layernorm)",
    "--batch-invariant-mode": "kernels of sparse attention do not promise it",
    "--use-transformer-engine-op-fuser": "it would have no effect on these layers",
    "--hybrid-context-parallel": "every microbatch is divided alike",
}


def dsa_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield every rule for a model with DSA layers.

    Args:
        config: the transformer configuration.
        options: its :class:`~megatron_dsa.config.options.DSAOptions`.
    """
    yield from attention_rules(config)
    yield from _mla_rules(config, options)
    yield from host_rules(config, options)
    if options.stage != "dense":
        yield from indexer_rules(config, options)


def _mla_rules(config: Any, options: Any):
    """What the absorbed MLA of DSA needs."""
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
    for flag, reason in UNSUPPORTED.items():
        given = getattr(config, flag.removeprefix("--").replace("-", "_"), None)
        yield not given, f"{flag} is not supported: {reason}; drop it"
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
        config.softmax_type == "vanilla"
        and config.window_size is None
        and config.window_attn_skip_freq is None,
        "--softmax-type, --window-size and --window-attn-skip-freq must keep their defaults: the "
        "selection is the mask",
    )
    yield from _ignored_rules(config)
    yield from size_rules(config)
    yield from expert_rules(config)
    yield (
        config.attention_dropout == 0.0,
        f"--attention-dropout must be 0, got {config.attention_dropout}: sparse attention kernels "
        "have no dropout",
    )
    yield (
        config.rope_type in ("rope", "yarn"),
        f"--rope-type must be 'rope' or 'yarn', got {config.rope_type!r}",
    )


def _ignored_rules(config: Any):
    """Settings of Megatron's attentions that this one would not read."""
    yield (
        config.rotary_percent == 1.0 or config.rope_type == "rope",
        f"--rotary-percent must be 1 with --rope-type yarn, got {config.rotary_percent}: YaRN "
        "rotates all of --qk-pos-emb-head-dim",
    )
    yield (
        config.softmax_scale is None,
        "--use-mup (and softmax_scale) are not supported: the softmax scale is that of MLA's head "
        "dims; drop it",
    )
    yield (
        config.num_query_groups in (None, config.num_attention_heads),
        f"--num-query-groups must be unset, got {config.num_query_groups}: all query heads share "
        "the latent key; drop it",
    )
    yield (
        config.linear_attention_freq is None and not config.is_hybrid_model,
        "--linear-attention-freq and --hybrid-layer-pattern are not supported: every layer has the "
        "attention of this package; drop them",
    )
    yield (
        config.dsa_kernel_backend == "none",
        f"--dsa-kernel-backend must be unset, got {config.dsa_kernel_backend!r}: it chooses "
        "kernels of Megatron's bundled DSA. Name kernels of this package by operation, such as "
        "--dsa-impl (docs/guide/flags.md)",
    )
    yield (
        not (config.fp8_dot_product_attention or config.fp8_multi_head_attention),
        "fp8_dot_product_attention and fp8_multi_head_attention are not supported: attention runs "
        "in --bf16; set them to False",
    )
    yield (
        not (config.use_kitchen or config.use_kitchen_attention),
        "--kitchen-config-file, --kitchen-recipe-number and --use-kitchen-attention are not "
        "supported: --transformer-impl chooses the layers; drop them",
    )
    offloaded = {"qkv_linear", "core_attn", "attn_proj"} & set(config.offload_modules or ())
    yield (
        not (config.fine_grained_activation_offloading and offloaded),
        f"--offload-modules must not name {', '.join(sorted(offloaded))}: activations of this "
        "attention are not offloaded",
    )


def _precision_rules(config: Any):
    """What quantisation and mixed precision need of the set of layers."""
    local, bf16 = config.transformer_impl == "local", "torch's linears would silently use --bf16"
    norms = "layernorm" in (config.recompute_modules or ())
    for flag, value, reason in (
        ("--fp8-format", config.fp8, bf16),
        ("--fp4-format", config.fp4, bf16),
        ("--te-precision-config-file", config.quant_recipe, "torch's linears do not read it"),
        ("--apply-layernorm-1p", config.layernorm_zero_centered_gamma, "torch's norms ignore it"),
        ("--recompute-modules layernorm", norms, "megatron-core 0.19 cannot recompute torch's"),
    ):
        yield (
            not (local and value),
            f"{flag} needs --transformer-impl transformer_engine: {reason}; drop it",
        )
    yield (
        not config.fp4_param,
        "--fp4-param-gather is not supported: it was never run with this attention; drop it",
    )
    yield (
        not config.fp32_residual_connection or config.params_dtype == torch.float32,
        "--fp32-residual-connection is not supported: neither torch's norms nor "
        "transformer-engine's take fp32 beside weights of 16 bits; drop it",
    )


def _fp8_indexer_rules(config: Any, options: Any):
    """What ``--dsa-fp8-indexer`` needs."""
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
            f"--{name.replace('_', '-')} must be a multiple of {unit} with --dsa-fp8-indexer, got "
            f"{size}: transformer-engine quantises weights with so many rows only. Drop "
            "--dsa-fp8-indexer, and the indexer runs in --bf16",
        )
    recomputed = config.recompute_granularity == "selective" and "core_attn" in (
        config.recompute_modules or ()
    )
    yield (
        not recomputed or getattr(config, "csa_compress_ratios", None) is None,
        "--dsa-fp8-indexer is not supported with --recompute-modules core_attn and "
        "--csa-compress-ratios: V4's indexer would be computed again in bf16, and select other "
        "keys; drop one of them",
    )


def host_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield what concerns every attention of this package: layouts, layer sets, features."""
    yield (
        # A string, or one per layer.
        config.context_parallel_size == 1 or "a2a" not in str(config.cp_comm_type),
        f"--cp-comm-type must be p2p or allgather, got {config.cp_comm_type}: this attention "
        "gathers keys and leaves queries where they are",
    )
    yield (
        config.context_parallel_size == 1
        or not config.mtp_num_layers
        or options.cp_layout != "contiguous",
        "--dsa-cp-layout must not be contiguous with --mtp-num-layers: Megatron shifts labels of "
        "multi-token prediction as if every sequence lay in zigzag order; use zigzag",
    )
    yield (
        config.tensor_model_parallel_size == 1 or config.sequence_parallel,
        "--sequence-parallel is required with --tensor-model-parallel-size > 1: without it the "
        "gradients of the latent norms are counted once per rank",
    )
    yield from overlap_rules(config, options)
    yield from graph_rules(config, options)
    yield (
        config.gtp_weight_remat_size == 1,
        "--tensor-parallel-num-weight-shards must be unset: absorption reads the whole "
        "up-projection weight of a rank's heads; drop it",
    )
    yield from _precision_rules(config)
    yield from _fp8_indexer_rules(config, options)
    yield from cache_rules(config, options)


def masked_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield where masked dense attention cannot be asked for.

    Args:
        config: the transformer configuration.
        options: its :class:`~megatron_dsa.config.options.DSAOptions`.
    """
    if options.selected_attention != "masked" or options.stage != "sparse":
        return
    flag = "--dsa-selected-attention must not be masked"
    yield (
        options.recompute == "nothing",
        f"{flag} with --dsa-recompute {options.recompute}: masked attention has no output in the "
        "space of the latents; drop one of the two",
    )
    yield (
        getattr(config, "csa_compress_ratios", None) is None,
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
    """Yield where tensor-parallel ranks cannot select by sequence and attend by heads.

    Args:
        config, options: as of :func:`masked_rules`.
        dense_loss: whether an indexer's loss is taken over all visible keys.
    """
    if options.tp_mode != "select" or config.tensor_model_parallel_size == 1:
        return
    flag = "--dsa-tp-mode must not be select"
    if getattr(config, "csa_compress_ratios", None) is not None:
        yield (
            False,
            f"{flag} with --csa-compress-ratios: V4's layers attend to lists of keys; use auto, "
            "heads or sequence",
        )
        return
    if options.stage != "sparse":
        return
    attention = options.selected_attention
    yield (
        attention == "masked",
        f"{flag} without masked dense attention, got --dsa-selected-attention {attention}: sparse "
        "attention goes by heads or by sequence; add --dsa-selected-attention masked, or use auto, "
        "which selects like this where attention is masked",
    )
    yield (
        not dense_loss,
        f"{flag} with an indexer loss over all visible keys: its teacher needs the queries of all "
        "heads; add --dsa-indexer-use-sparse-loss, or --dsa-tp-mode heads",
    )


def indexer_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """What the indexer needs to be given."""
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        value = getattr(config, name)
        yield (
            isinstance(value, int) and value >= 1,
            f"--{name.replace('_', '-')} must be a positive integer in stage "
            f"'{options.stage}', got {value}",
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
