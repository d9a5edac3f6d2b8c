"""What the arithmetic of inference engines needs: scores, and keys as their caches hold them."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.ops.dispatch.policy import EXACT
from megatron_dsa.ops.indexer_topk.engine import LARGEST_DIM


def numerics_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield where an indexer cannot select as inference engines do."""
    numerics = options.indexer_numerics
    if numerics == EXACT:
        return
    flag, dim = f"--dsa-indexer-numerics {numerics}", config.dsa_indexer_head_dim or 0
    yield (
        config.dsa_indexer_scoring_relu,
        f"--no-dsa-indexer-scoring-relu must not be used with {flag}: the engines' scores have a "
        "relu; drop one of them",
    )
    yield (
        dim <= LARGEST_DIM,
        f"--dsa-indexer-head-dim must be at most {LARGEST_DIM} with {flag}, got {dim}: engines "
        f"have one scale per {LARGEST_DIM} dims, and their kernel takes one",
    )


def cache_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield where keys cannot be rounded as the engines' caches hold them."""
    if options.kv_rounding == "none":
        return
    flag = f"--dsa-kv-rounding {options.kv_rounding}"
    yield (
        config.params_dtype == torch.bfloat16,
        f"{flag} needs --bf16, got {config.params_dtype}: engines fill their caches from bf16",
    )
    is_v4 = getattr(config, "csa_compress_ratios", None) is not None
    name, block = ("qk_head_dim", 64) if is_v4 else ("kv_lora_rank", 128)
    dims = getattr(config, name)
    yield (
        dims % block == 0,
        f"--{name.replace('_', '-')} must be a multiple of {block} with {flag}, got {dims}: so "
        "many dims share a scale",
    )
