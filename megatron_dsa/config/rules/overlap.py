"""What Megatron's interleaved schedule of two microbatches, and delayed weight gradients, can take.

Megatron itself refuses more: without expert parallelism, and delayed weight gradients without that
schedule or without transformer-engine, so that no rule here is about the latter alone.
"""

from collections.abc import Iterator
from typing import Any


def overlap_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    """Yield the rules of ``--overlap-moe-expert-parallel-comm``.

    Args:
        config: the transformer configuration.
        options: its :class:`~megatron_dsa.config.options.DSAOptions`.
    """
    flag = "--overlap-moe-expert-parallel-comm must not be used"
    overlaps = config.overlap_moe_expert_parallel_comm
    yield (
        not overlaps or getattr(config, "hc_mult", 1) == 1,
        f"{flag} with --hc-mult above 1: Megatron's schedule adds experts to one residual; drop "
        "one of them",
    )
    yield (
        not overlaps or options.stage != "sparse" or config.dsa_indexer_topk_freq == 1,
        f"{flag} with --dsa-indexer-topk-freq {config.dsa_indexer_topk_freq}: Megatron's schedule "
        "hands hidden states alone from layer to layer, and layers that reuse a selection need it; "
        "drop one of them",
    )
    yield (
        not overlaps or config.cuda_graph_impl == "none",
        f"{flag} with --cuda-graph-impl {config.cuda_graph_impl}: the two were not run together; "
        "drop one of them",
    )
    frozen = options.stage == "warmup" and options.freeze_main
    yield (
        not overlaps or not frozen,
        f"{flag} in a frozen warm-up: Megatron's schedule starts the backward pass from the "
        "language model's loss, which then has no gradient; drop it, or add "
        "--dsa-warmup-train-all",
    )
