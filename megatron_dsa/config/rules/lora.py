"""Adapted linears and rules of LoRA."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.config.rules.sizes import is_moe_layer
from megatron_dsa.config.rules.table import Must, check_rows, uses_csa

_ATTENTION = "self_attention."
_CORE = f"{_ATTENTION}core_attention."
#: Linears of V3.2 and GLM-5 in checkpoints -> Megatron's module, which may fuse two linears.
V3_LINEARS = {
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.indexer.wq_b": "self_attention.core_attention.indexer.linear_wq_b",
    "self_attn.indexer.wk": "self_attention.core_attention.indexer.linear_wk",
    "self_attn.indexer.weights_proj": "self_attention.core_attention.indexer.linear_weights_proj",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
#: Linears of V4 in checkpoints -> Megatron's module.
V4_LINEARS = {
    "attn.wq_a": f"{_ATTENTION}linear_q_down_proj",
    "attn.wq_b": f"{_ATTENTION}linear_q_up_proj",
    "attn.wkv": f"{_ATTENTION}linear_kv_proj",
    "attn.wo_a": f"{_ATTENTION}linear_o_group_proj",
    "attn.wo_b": f"{_ATTENTION}linear_proj",
    "attn.compressor.wkv": f"{_CORE}compressor.linear_wkv",
    "attn.compressor.wgate": f"{_CORE}compressor.linear_wgate",
    "attn.indexer.wq_b": f"{_CORE}indexer.linear_wq_b",
    "attn.indexer.weights_proj": f"{_CORE}indexer.linear_weights_proj",
    "attn.indexer.compressor.wkv": f"{_CORE}indexer.compressor.linear_wkv",
    "attn.indexer.compressor.wgate": f"{_CORE}indexer.compressor.linear_wgate",
    "ffn.shared_experts.w1": "mlp.shared_experts.linear_fc1",
    "ffn.shared_experts.w3": "mlp.shared_experts.linear_fc1",
    "ffn.shared_experts.w2": "mlp.shared_experts.linear_fc2",
}
#: Target that selects all linears, as in PEFT.
ALL = "all-linear"

_ROWS = (
    Must("delay_wgrad_compute", False, "frozen weights have no gradient"),
    Must("indexer_pool_size", 1, "the gate of pools has no adapter", "--dsa-indexer-pool-size"),
    Must("output_gate", False, "the gate has no adapter", "--dsa-output-gate"),
    Must("fp8_param", False, "the optimizer, which quantises such weights, holds no frozen ones"),
    Must("cuda_graph_impl", "none", "they were not run together"),
    Must("overlap_moe_expert_parallel_comm", False, "they were not run together"),
)
_WITHOUT_RANK = (
    Must("lora_targets", False, "nothing has adapters; add --lora-rank or drop them"),
    Must("lora_alpha", False, "nothing has adapters; add --lora-rank or drop it"),
)
_OF_QUERY_LATENT = ("self_attn.q_a_proj", "self_attn.q_b_proj")
_OF_COMPRESSOR = "attn.compressor."
_INDEXER, _SHARED = ".indexer.", ".shared_experts."


def modules_of_linears(config: Any) -> dict[str, str]:
    return V4_LINEARS if uses_csa(config) else V3_LINEARS


def linears_named(config: Any, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the linears whose name or dotted suffix is a target, as in PEFT."""
    linears = modules_of_linears(config)
    return tuple(x for x in linears if any(_names(target, x) for target in targets))


def _names(target: str, linear: str) -> bool:
    return target == ALL or linear == target or linear.endswith(f".{target}")


def existing_linears(config: Any, options: Any) -> tuple[str, ...]:
    linears = modules_of_linears(config)
    ratios = getattr(config, "csa_compress_ratios", None)
    indexer = options.stage != "dense" and bool(config.dsa_indexer_loss_coeff)
    indexer = indexer and (ratios is None or CSA_RATIO in ratios)
    experts = [is_moe_layer(config, i) for i in range(config.num_layers)]
    shared = any(experts) and bool(config.moe_shared_expert_intermediate_size)

    def exists(linear: str) -> bool:
        if _INDEXER in linear:
            return indexer
        if _SHARED in linear:
            return shared
        if linear.startswith(_OF_COMPRESSOR):
            return any(ratios or ())
        if linear in _OF_QUERY_LATENT:
            return config.q_lora_rank is not None
        return linear.startswith(("self_attn.", "attn.")) or not all(experts)

    return tuple(filter(exists, linears))


def adapted_linears(config: Any, options: Any) -> tuple[str, ...]:
    if options.lora_rank is None:
        return ()
    named = linears_named(config, options.lora_targets)
    return tuple(x for x in existing_linears(config, options) if x in named)


def adapts_indexer(config: Any, options: Any) -> bool:
    return any(_INDEXER in x for x in adapted_linears(config, options))


def rank_and_alpha(options: Any) -> tuple[int, float]:
    rank, alpha = options.lora_rank, options.lora_alpha
    return rank, float(rank if alpha is None else alpha)


def lora_option_rules(options: Any) -> Iterator[tuple[Any, str]]:
    if options.lora_rank is None:
        yield from check_rows(_WITHOUT_RANK, options, case="without --lora-rank")
        return
    yield (
        options.lora_targets,
        "--lora-targets is required with --lora-rank: name linears, for example q_b_proj o_proj, "
        f"or {ALL}",
    )


def lora_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    if options.lora_rank is None:
        return
    existing = existing_linears(config, options)
    for target in options.lora_targets:
        yield (
            any(_names(target, linear) for linear in existing),
            f"--lora-targets {target} names no linear of this model"
            f"{_why(target, config, options)}; there are {', '.join(existing)}, and {ALL} for all "
            "of them",
        )
    adapted = adapted_linears(config, options)
    frozen = options.stage == "warmup" and options.freeze_main
    yield (
        not frozen or adapts_indexer(config, options),
        "--lora-targets must name a linear of the indexer in --dsa-stage warmup, which trains "
        "nothing else: add indexer.wq_b or weights_proj, or --dsa-warmup-train-all",
    )
    yield (
        not (config.moe_shared_expert_overlap and any(_SHARED in x for x in adapted)),
        "--moe-shared-expert-overlap must not be used with adapters of shared experts: it takes "
        "the communication out of their linears, and that of adapters stays; drop it",
    )
    yield from check_rows(_ROWS, config, case="with --lora-rank")


def _why(target: str, config: Any, options: Any) -> str:
    linears = modules_of_linears(config)
    if target.startswith("experts.") or ".experts." in target:
        return ": routed experts have no adapters, they are no linears in transformers either"
    named = [x for x in linears if _names(target, x)]
    if any(_INDEXER in x for x in named):
        if options.stage != "dense" and config.dsa_indexer_loss_coeff:
            return f": no layer has ratio {CSA_RATIO}, and with it an indexer"
        cause = "--dsa-stage dense" if options.stage == "dense" else "--dsa-indexer-loss-coeff 0"
        return f": with {cause} no indexer is trained"
    other = V3_LINEARS if linears is V4_LINEARS else V4_LINEARS
    if not named and any(_names(target, x) for x in other):
        family = "DeepSeek-V4" if linears is V3_LINEARS else "DeepSeek-V3.2 and GLM-5"
        return f": linears have that name in {family}"
    return ""
