"""Rules of hash routing (``moe_hash_layers``)."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.rules.table import Must, Not, check_rows

_ROWS = (
    Must(
        "moe_router_load_balancing_type", Not(("sinkhorn", "quantile_balancing")),
        "it chooses experts by itself; use none, aux_loss, seq_aux_loss or global_aux_loss",
    ),
    Must(
        "moe_enable_routing_replay", False,
        "these layers choose by their table and record nothing",
    ),
    Must(
        "dsa_indexer_topk_freq", 1,
        "token ids and shared selections would take the same way from layer to layer",
    ),
    Must("mlp_chunks_for_training", 1, "chunks of tokens would come without ids"),
    Must(
        "cuda_graph_impl", "none",
        "Megatron's graphs of layers take hidden states and no token ids",
    ),
)  # fmt: skip


def hash_rules(config: Any) -> Iterator[tuple[Any, str]]:
    layers = getattr(config, "moe_hash_layers", 0)
    if not layers:
        return
    yield (
        layers <= config.num_layers and _all_experts(config, layers),
        f"--moe-hash-layers ({layers}) must count layers with experts at the start of the model: "
        "give --num-experts and a --moe-layer-freq that makes them expert layers, or fewer",
    )
    yield from check_rows(_ROWS, config, case=f"with --moe-hash-layers {layers}")
    first = _first_chunk(config)
    yield (
        first is None or layers <= first,
        f"--moe-hash-layers ({layers}) must lie on the first pipeline stage, in its first virtual "
        f"one, which has {first} layer(s): token ids do not travel between stages. Give that stage "
        "more layers (--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers), or "
        "use fewer stages",
    )


def _all_experts(config: Any, layers: int) -> bool:
    pattern = config.moe_layer_freq
    if config.num_moe_experts is None:
        return False
    return pattern == 1 or layers == 1 if isinstance(pattern, int) else all(pattern[:layers])


def _first_chunk(config: Any) -> int | None:
    """Return the number of decoder layers on the embedding's stage, ``None`` for all."""
    if config.pipeline_model_parallel_size == 1:
        return None
    stages = getattr(config.pipeline_model_parallel_layout, "layout", None)
    if stages is not None:
        # Megatron's parsed layout lists layer kinds per rank and virtual stage.
        return sum(kind.name == "decoder" for kind in stages[0][0])
    if config.pipeline_model_parallel_layout is not None:
        return None
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    virtual = config.virtual_pipeline_model_parallel_size
    return get_num_layers_to_build(config, vp_stage=0 if virtual else None, pp_rank=0)
