"""Rules of layers with experts: which layers have them, and how tokens are routed."""

from collections.abc import Iterator
from typing import Any


def is_moe_layer(config: Any, index: int) -> bool:
    """Return ``True`` if decoder layer ``index`` (from 0) has experts instead of a dense MLP."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def expert_rules(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield rules for the pattern of layers, and for counts of experts and groups."""
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if experts is None:
        return
    pattern = config.moe_layer_freq
    listed = isinstance(pattern, list)
    yield (
        (len(pattern) == config.num_layers and set(pattern) <= {0, 1}) if listed else pattern >= 1,
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
