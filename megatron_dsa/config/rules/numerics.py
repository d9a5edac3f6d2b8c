"""Rules for imitating the scores and cached keys of inference engines."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.rules.table import uses_csa
from megatron_dsa.ops.dispatch.policy import EXACT
from megatron_dsa.ops.indexer_topk.engine import LARGEST_DIM


def numerics_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    if options.indexer_numerics == EXACT:
        return
    case = f"with --dsa-indexer-numerics {options.indexer_numerics}"
    dim = config.dsa_indexer_head_dim or 0
    yield (
        config.dsa_indexer_scoring_relu,
        f"--no-dsa-indexer-scoring-relu must not be used {case}: the engines' scores have a relu; "
        "drop one of them",
    )
    yield (
        dim <= LARGEST_DIM,
        f"--dsa-indexer-head-dim must be at most {LARGEST_DIM} {case}, got {dim}: engines have "
        f"one scale per {LARGEST_DIM} dims, and their kernel takes one",
    )


def cache_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    if options.kv_rounding == "none":
        return
    case = f"with --dsa-kv-rounding {options.kv_rounding}"
    yield (
        config.params_dtype == torch.bfloat16,
        f"--bf16 is required {case}, got {config.params_dtype}: engines fill their caches from "
        "bf16; add it",
    )
    name, block = ("qk_head_dim", 64) if uses_csa(config) else ("kv_lora_rank", 128)
    dims = getattr(config, name)
    yield (
        dims % block == 0,
        f"{flag_of(name)} must be a multiple of {block} {case}, got {dims}: so many dims share a "
        "scale",
    )
