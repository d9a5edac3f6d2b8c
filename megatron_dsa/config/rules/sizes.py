"""Rules for sizes of attention and experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.rules.ranges import range_rules

TENSOR, EXPERT_TENSOR = "tensor_model_parallel_size", "expert_tensor_parallel_size"
#: Size field -> field with the number of ranks that shard the size.
SHARED = {"num_attention_heads": TENSOR, "ffn_hidden_size": TENSOR}
#: Expert size field -> field with the number of ranks that shard the size.
SHARED_BY_EXPERTS = {
    "moe_shared_expert_intermediate_size": TENSOR,
    "moe_ffn_hidden_size": EXPERT_TENSOR,
    "num_moe_experts": "expert_model_parallel_size",
}
#: Attention sizes, also checked in configurations from Python.
_NUMBERS = (
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim",
    "rotary_base", "rotary_scaling_factor", "rotary_percent",
)  # fmt: skip
_OF_YARN = (
    "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale", "mscale_all_dim",
)  # fmt: skip


def size_rules(config: Any) -> Iterator[tuple[Any, str]]:
    for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim"):
        if getattr(config, name) is None:
            yield False, f"{flag_of(name)} is required: attention is multi-latent"
            return
    names = _NUMBERS + (_OF_YARN if config.rope_type == "yarn" else ())
    yield from range_rules({name: getattr(config, name) for name in names})
    nope, rope = config.qk_head_dim, config.qk_pos_emb_head_dim
    yield (
        rope % 2 == 0,
        f"--qk-pos-emb-head-dim must be even, got {rope}: rope rotates pairs of dims; use "
        f"{rope + 1}",
    )
    yield (
        rope % 2 != 0 or nope % 2 == 0,
        f"--qk-head-dim must be even, got {nope}: rope rotates pairs of dims of whole heads; use "
        f"{nope + 1}",
    )
    yield from share_rules(config, SHARED)
    if config.num_moe_experts is not None:
        yield from share_rules(config, SHARED_BY_EXPERTS)
    uniform = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    yield (
        not (config.mtp_num_layers and uniform) or config.recompute_num_layers == 1,
        "--recompute-num-layers must be 1 with --mtp-num-layers and --recompute-method uniform, "
        f"got {config.recompute_num_layers}: Megatron recomputes layers of multi-token prediction "
        "one by one; use 1, or --recompute-method block",
    )


def share_rules(values: Any, shared: Mapping[str, str]) -> Iterator[tuple[Any, str]]:
    for name, ranks in shared.items():
        size, count = getattr(values, name), getattr(values, ranks)
        yield (
            size is None or size % count == 0,
            f"{flag_of(name)} ({size}) must be a multiple of {flag_of(ranks)} ({count}): ranks "
            "hold equal parts",
        )


def is_moe_layer(config: Any, index: int) -> bool:
    """Return True if decoder layer ``index`` (from 0) has experts."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def expert_rules(config: Any) -> Iterator[tuple[Any, str]]:
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if experts is None:
        return
    pattern = config.moe_layer_freq
    listed = isinstance(pattern, list)
    # ``hybrid_rules`` checks hybrid models.
    fits = not listed or config.is_hybrid_model or len(pattern) == config.num_layers
    yield (
        (fits and set(pattern) <= {0, 1}) if listed else pattern >= 1,
        "--moe-layer-freq must be a positive number, or a list of 0 (dense) and 1 (experts) with "
        f"an entry for each of the {config.num_layers} layers, got {pattern}",
    )
    yield (
        topk <= experts,
        f"--moe-router-topk ({topk}) must be at most --num-experts ({experts}): a token goes to "
        "different experts",
    )
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    yield (
        not groups or bool(chosen),
        f"--moe-router-group-topk is required with --moe-router-num-groups {groups}, got {chosen}: "
        "without it groups have no effect; add it or drop both",
    )
    if groups and chosen:
        yield (
            chosen <= topk <= chosen * (experts // groups),
            f"--moe-router-topk ({topk}) must be at least --moe-router-group-topk ({chosen}), and "
            f"at most the {chosen * (experts // groups)} experts of so many groups: a group is "
            "scored by its best --moe-router-topk / --moe-router-group-topk experts",
        )
