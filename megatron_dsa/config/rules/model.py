"""Rules of attention, indexer, layouts and layer sets."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.rules.cuda_graphs import PER_LAYER, graph_rules
from megatron_dsa.config.rules.numerics import cache_rules, numerics_rules
from megatron_dsa.config.rules.ranges import range_rules
from megatron_dsa.config.rules.sizes import expert_rules, size_rules
from megatron_dsa.config.rules.table import Must, Not, check_rows, uses_csa
from megatron_dsa.ops.dispatch.policy import EXACT

_ONE_MASK = "the selection is the mask"
_KITCHEN = "--transformer-impl chooses the layers"
#: Rules for every attention of this package.
ATTENTION = (
    Must("cache_mla_latents", False, "it is for inference, which this package does not do"),
    Must("mla_down_proj_fusion", False, "the indexer reads the query latent"),
    Must("qk_clip", False, "the sparse kernels do not report the largest logit"),
    Must("log_max_attention_logit", False, "the sparse kernels do not report it"),
    Must("no_rope_freq", False, "all layers have the rope of --qk-pos-emb-head-dim"),
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
    Must("softmax_type", ("vanilla", "learnable"), "no released model has a sink fixed at 0"),
    Must("window_size", None, _ONE_MASK),
    Must("window_attn_skip_freq", None, _ONE_MASK),
    Must(
        "softmax_scale", None, "the softmax scale is that of MLA's head dims",
        "--use-mup (or softmax_scale)",
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
_LINEARS = "torch's linears would silently use --bf16"
#: Rules with ``--transformer-impl local``.
_LOCAL_LAYERS = (
    Must("fp8", None, _LINEARS),
    Must("fp4", None, _LINEARS),
    Must("quant_recipe", None, "torch's linears do not read it"),
    Must("layernorm_zero_centered_gamma", False, "torch's norms ignore it"),
)
_SCHEDULE = "Megatron's schedule"
#: Rules with ``--overlap-moe-expert-parallel-comm`` that Megatron lacks.
_OVERLAP = (
    Must("hc_mult", 1, f"{_SCHEDULE} adds experts to one residual"),
    Must("cuda_graph_impl", "none", "the two were not run together"),
)
#: Rules with ``--dsa-indexer-teacher served``.
_SERVED = (
    Must(
        "dsa_indexer_use_sparse_loss", True,
        "layers that reuse a selection compute no probabilities of other keys; add it, or drop "
        "--dsa-indexer-teacher",
    ),
    Must(
        "cuda_graph_impl", Not(PER_LAYER),
        "head sums of its layers were not captured yet; use full_iteration or none",
    ),
    Must(
        "indexer_loss_heads", 1, "the layers of a group add their sums of all heads; drop it",
        "--dsa-indexer-loss-heads",
    ),
    Must(
        "overlap_moe_expert_parallel_comm", False,
        f"{_SCHEDULE} sends back gradients of hidden states only; drop one of the two",
    ),
)  # fmt: skip
#: Rule for recomputed layers that share randomly drawn query tokens.
_DRAWS_TWICE = Must(
    "cuda_graph_impl", Not(("full_iteration",)),
    "the second pass would draw other tokens, as Megatron keeps no copy of the generator's state "
    "then; add --dsa-indexer-loss-queries 1, or drop one",
)  # fmt: skip
#: Rules with ``--dsa-selected-attention masked``.
_MASKED = (
    Must(
        "recompute", "nothing",
        "masked attention has no output in the space of the latents; drop one of the two",
        "--dsa-recompute",
    ),
    Must(
        "csa_compress_ratios", None,
        "V4's layers attend to lists of window and compressed keys; drop --dsa-selected-attention",
    ),
)  # fmt: skip
#: Rules with ``--softmax-type learnable``.
_SINKS = (
    Must("csa_compress_ratios", None, "V4's layers always have sinks; drop --softmax-type"),
    Must(
        "stage", "sparse", "attention to all visible keys has no sinks; use sparse, whose indexers "
        "learn from selected keys", "--dsa-stage",
    ),
)  # fmt: skip
_SINKS_DENSE_LOSS = Must(
    "dsa_indexer_use_sparse_loss", True, "a teacher of all visible keys has no sinks; add it"
)
#: Rule with ``--dsa-output-gate``.
_GATE_CSA = Must(
    "csa_compress_ratios", None, "V4's layers have output groups; drop --dsa-output-gate"
)
_EXPANDED_BY_HEADS = Must(
    "tp_mode", Not(("sequence",)),
    "a rank expands the keys of its local heads only; use heads or select, or "
    "--dsa-selected-attention auto or sparse",
    "--dsa-tp-mode",
)  # fmt: skip
#: Rule with ``--dsa-tp-mode select``.
_SELECT_CSA = Must(
    "csa_compress_ratios", None,
    "V4's layers attend to lists of keys; use --dsa-tp-mode auto, heads or sequence",
)  # fmt: skip
_SELECT_DSA = Must(
    "selected_attention", "masked",
    "sparse attention goes by heads or by sequence; add --dsa-selected-attention masked, or use "
    "--dsa-tp-mode auto, which selects like this where attention is masked",
    "--dsa-selected-attention",
)  # fmt: skip


def _recomputes(config: Any, module: str) -> bool:
    return module in (config.recompute_modules or ())


def dsa_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    yield from attention_rules(config)
    yield Must(
        "recompute", Not(("queries",)),
        "only V4's attention computes its queries again; give latent_output, or drop it",
        "--dsa-recompute",
    ).check(config, options)  # fmt: skip
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
    yield from check_rows(ATTENTION, config)
    if config.rope_type == "yarn":
        yield Must("rotary_percent", 1, "YaRN rotates all of --qk-pos-emb-head-dim; drop it").check(
            config, case="with --rope-type yarn"
        )
    yield Must(
        "num_query_groups", (None, config.num_attention_heads),
        "all query heads share the latent key; drop it",
    ).check(config)  # fmt: skip
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
        case = "with --transformer-impl local"
        yield from check_rows(_LOCAL_LAYERS, config, case=case)
        yield (
            not _recomputes(config, "layernorm"),
            f"--recompute-modules must not name layernorm {case}: megatron-core 0.19 cannot "
            "recompute torch's; drop it",
        )
    yield (
        not config.fp32_residual_connection or config.params_dtype == torch.float32,
        "--fp32-residual-connection is not supported: neither torch's norms nor "
        "transformer-engine's take fp32 beside weights of 16 bits; drop it",
    )


def _fp8_indexer_rules(config: Any, options: Any):
    if not options.fp8_indexer:
        return
    case = "with --dsa-fp8-indexer"
    yield config.fp8, f"--fp8-format is required {case}, which quantises nothing else: add it"
    unit = 32 if config.fp8_recipe == "mxfp8" else 8
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim"):
        size = getattr(config, name) or 0
        yield (
            size % unit == 0,
            f"{flag_of(name)} must be a multiple of {unit} {case}, got {size}: transformer-engine "
            "quantises weights with so many rows only. Drop --dsa-fp8-indexer, and the indexer "
            "runs in --bf16",
        )
    recomputed = config.recompute_granularity == "selective" and _recomputes(config, "core_attn")
    yield (
        not (recomputed and uses_csa(config)),
        f"--recompute-modules must not name core_attn {case} and --csa-compress-ratios: V4's "
        "indexer would be computed again in bf16, and select other keys; drop one of them",
    )


def _overlap_rules(config: Any, options: Any):
    if not config.overlap_moe_expert_parallel_comm:
        return
    flag = "--overlap-moe-expert-parallel-comm"
    yield from check_rows(_OVERLAP, config, case=f"with {flag}")
    yield (
        options.stage != "warmup" or not options.freeze_main,
        f"{flag} must not be used in a frozen warm-up: {_SCHEDULE} starts the backward pass from "
        "the language model's loss, which then has no gradient; drop it, or add "
        "--dsa-warmup-train-all",
    )


def host_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    several = config.context_parallel_size > 1
    yield (
        # ``cp_comm_type`` is one string or a list of strings.
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
    if options.selected_attention == "masked" and options.stage == "sparse":
        case = "with --dsa-selected-attention masked"
        yield from check_rows(_MASKED, config, options, case)
        if config.tensor_model_parallel_size > 1:
            yield _EXPANDED_BY_HEADS.check(config, options, case)


def sink_rules(config: Any, options: Any, dense_loss: bool) -> Iterator[tuple[Any, str]]:
    if config.softmax_type == "learnable":
        case = "with --softmax-type learnable"
        yield from check_rows(_SINKS, config, options, case)
        if dense_loss and options.stage == "sparse":
            yield _SINKS_DENSE_LOSS.check(config, options, case)
    if options.output_gate:
        yield _GATE_CSA.check(config, options, "with --dsa-output-gate")


def tp_mode_rules(config: Any, options: Any, dense_loss: bool) -> Iterator[tuple[Any, str]]:
    if options.tp_mode != "select" or config.tensor_model_parallel_size == 1:
        return
    case = "with --dsa-tp-mode select"
    if uses_csa(config):
        yield _SELECT_CSA.check(config, options, case)
    elif options.stage == "sparse":
        yield _SELECT_DSA.check(config, options, case)
        yield (
            not dense_loss,
            f"--dsa-indexer-use-sparse-loss is required {case}: the teacher of a loss over all "
            "visible keys needs the queries of all heads; add it, or --dsa-tp-mode heads",
        )


def _head_share_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    share, parts, flag = options.indexer_loss_heads, options.head_parts, "--dsa-indexer-loss-heads"
    if share == 1:
        return
    yield (
        share * parts == 1 and parts in (2, 4, 8, 16, 32, 64),
        f"{flag} must be 1 or 1/2, 1/4, ..., 1/64, got {share:g}: a tile of 64 query tokens has "
        "equally many for each group of heads; give one of these",
    )
    yield (
        options.indexer_loss_queries < 1,
        f"{flag} below 1 needs --dsa-indexer-loss-queries below 1, got 1: the heads of a query "
        "token follow from its random position in a tile; drop one or give a share of both",
    )
    ranks, heads = config.tensor_model_parallel_size, config.num_attention_heads
    for what, rest in (
        (f"divide --num-attention-heads ({heads})", heads % parts),
        (f"be a multiple of --tensor-model-parallel-size ({ranks})", parts % ranks),
    ):
        yield rest == 0, f"1 / {flag} must {what}, got {parts}: ranks and parts have whole heads"
    yield (
        (options.stage == "sparse" and config.dsa_indexer_use_sparse_loss) or ranks == 1,
        f"{flag} must be 1 with a loss over all visible keys and --tensor-model-parallel-size "
        f"{ranks}: a tile's teacher is summed over all ranks; drop it",
    )
    yield (
        not uses_csa(config),
        f"{flag} must be 1 with --csa-compress-ratios: the teacher of V4's layers is a ratio of "
        "sums over all heads, which some heads do not estimate without bias; drop it",
    )


#: Rules with ``--dsa-indexer-pool-size`` above 1.
_POOLED = (
    Must("csa_compress_ratios", None, "V4's layers have compressed keys"),
    Must("qk_pos_emb_head_dim", 0, "keys of several positions become one; give 0"),
    Must(
        "dsa_indexer_rotate_activation", False, "keys are pooled per channel",
        "--no-dsa-indexer-rotate-activation (rotation)",
    ),
    Must("context_parallel_size", 1, "pools are lists of one rank's keys"),
    Must("indexer_numerics", EXACT, "engines' scores of pools are not known",
         "--dsa-indexer-numerics"),
)  # fmt: skip


def _pool_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    size, topk = options.indexer_pool_size, config.dsa_indexer_topk
    if size <= 1:
        return
    yield (
        not topk or (type(topk) is int and topk % size == 0),
        f"--dsa-indexer-pool-size must divide --dsa-indexer-topk ({topk}), got {size}: whole pools "
        "are selected",
    )
    yield from check_rows(_POOLED, config, options, "with --dsa-indexer-pool-size")


def indexer_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    numbers = {}
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        numbers[name] = value = getattr(config, name)
        yield value is not None, f"{flag_of(name)} is required in --dsa-stage {options.stage}"
        yield (
            value is None or type(value) is int,
            f"{flag_of(name)} must be a whole number, got {value!r}: give one",
        )
    yield from range_rules(
        numbers
        | {"dsa_indexer_topk_freq": config.dsa_indexer_topk_freq}
        | {"dsa_indexer_skip_topk_offset": config.dsa_indexer_skip_topk_offset}
        | {"dsa_indexer_loss_coeff": config.dsa_indexer_loss_coeff}
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
    yield from numerics_rules(config, options)
    yield from _pool_rules(config, options)
    yield from _head_share_rules(config, options)
    served = options.indexer_teacher == "served" and config.dsa_indexer_topk_freq > 1
    if served and options.stage == "sparse":
        case = "with --dsa-indexer-teacher served"
        yield from check_rows(_SERVED, config, options, case)
        if options.indexer_loss_queries < 1 and config.recompute_granularity is not None:
            case += ", a share of the query tokens and recomputed layers"
            yield _DRAWS_TWICE.check(config, options, case)
    coefficient, trained = config.dsa_indexer_loss_coeff, options.stage == "warmup"
    yield (
        coefficient if trained else coefficient is not None,
        f"--dsa-indexer-loss-coeff is required in --dsa-stage {options.stage}, got {coefficient}: "
        + (
            "the loss is what trains the indexer; pass 1.0"
            if trained
            else "without a loss the indexer stays as it is, random if no checkpoint has it; pass "
            "1.0 to train it, or 0 to freeze it on purpose"
        ),
    )
