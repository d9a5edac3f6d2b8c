"""Decoder layers of a pipeline stage."""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dsa.config.hybrid import attention_layers
from megatron_dsa.config.model import selects_keys
from megatron_dsa.errors import require


def layers_of_stage(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> Sequence[int]:
    """Return the layer indices (from 0) of a pipeline stage.

    Raises:
        ConfigError: stages that lose or repeat layers, or start with a reused selection.
    """
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        layers = layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    else:
        _require_whole_stages(config)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
        layers = range(first, first + count)
    attention = [number for number in attention_layers(config) if number - 1 in layers]
    require(
        not attention or selects_keys(config, attention[0]),
        f"layer {(*attention, 0)[0]} is the first sparse attention of a pipeline stage but reuses "
        "the selection of an earlier layer: index sharing does not cross pipeline stages. Choose a "
        "split whose stages start with a layer that selects (--dsa-indexer-topk-freq "
        f"{config.dsa_indexer_topk_freq}, --dsa-indexer-skip-topk-offset "
        f"{config.dsa_indexer_skip_topk_offset}).",
    )
    return layers


def _require_whole_stages(config: Any) -> None:
    ranks = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if chunks is None else range(chunks)
    try:
        counts = [
            get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
            for rank in range(ranks)
            for stage in stages
        ]
    except AssertionError as error:
        counts, reason = [], " ".join(str(error).split())
    else:
        reason = f"its stages would have {counts} layers"
    require(
        bool(counts) and min(counts) >= 0 and sum(counts) == config.num_layers,
        f"--num-layers {config.num_layers} cannot be split over --pipeline-model-parallel-size "
        f"{ranks}{'' if chunks is None else f' times {chunks} virtual stages'}: {reason}. Give "
        "other --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and virtual "
        "stages, or a --pipeline-model-parallel-layout",
    )
