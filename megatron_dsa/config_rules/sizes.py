"""Sizes that the first step needs: of heads, latents and rope, and of recomputed layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def size_rules(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield rules for the sizes of a model, each with its flag."""
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"):
        size, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        needed = "" if name != "q_lora_rank" else ", or unset"
        yield (
            (size is None and name == "q_lora_rank") or (size is not None and size >= 1),
            f"{flag} must be at least 1{needed}, got {size}",
        )
    nope, rope = config.qk_head_dim, config.qk_pos_emb_head_dim
    yield (
        rope >= 0 and rope % 2 == 0,
        f"--qk-pos-emb-head-dim must be even and not negative, got {rope}: rope rotates pairs of "
        "dims",
    )
    yield (
        rope % 2 != 0 or nope % 2 == 0,
        f"--qk-head-dim must be even, got {nope}: rope rotates pairs of dims of whole heads; use "
        f"{nope + 1}",
    )
    for name in ("rotary_base", "rotary_scaling_factor"):
        value = getattr(config, name)
        yield (
            0 < value < math.inf,
            f"--{name.replace('_', '-')} must be positive and finite, got {value}",
        )
    yield (
        0 < config.rotary_percent <= 1,
        f"--rotary-percent must be above 0 and at most 1, got {config.rotary_percent}",
    )
    uniform = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    yield (
        not (config.mtp_num_layers and uniform) or config.recompute_num_layers == 1,
        "--recompute-num-layers must be 1 with --mtp-num-layers and --recompute-method uniform, "
        f"got {config.recompute_num_layers}: Megatron recomputes layers of multi-token prediction "
        "one by one; use 1, or --recompute-method block",
    )
