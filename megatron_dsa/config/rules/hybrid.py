"""Rules of hybrid models (``--hybrid-layer-pattern``)."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron_dsa.config.hybrid import (
    ATTENTION,
    EXPERTS,
    MLP,
    decoder_of,
    has_pattern,
    predictions_of,
    stages_of,
)
from megatron_dsa.config.rules.table import Must, check_rows

_FLAG = "--hybrid-layer-pattern"
_APART = "they were not run together"
_ROWS = (
    Must("csa_compress_ratios", None, "Megatron's hybrid stacks have no slot for V4's layers"),
    Must("hc_mult", 1, "layers of a hybrid stack have plain residuals"),
    Must("moe_hash_layers", 0, "token ids reach layers of a GPT only"),
    Must("lora_rank", None, _APART),
    Must("cuda_graph_impl", "none", _APART),
    Must("overlap_moe_expert_parallel_comm", False, "Megatron has no schedule of hybrid layers"),
    Must("fine_grained_activation_offloading", False, _APART),
)
#: Letters of layers that need transformer-engine -> layer names.
_OF_ENGINE = {"M": "Mamba", "*": "attention", "+": "dense MLA"}
#: Letters of layers that shard sequences in zigzag order.
_RECURRENT = "MG"


def hybrid_rules(config: Any, options: Any, selects: Callable[[int], bool]) -> Iterator:
    """Yield rules of hybrid models; ``selects(layer)`` is True if a layer (from 1) selects keys."""
    if not has_pattern(config):
        yield (
            not config.is_hybrid_model,
            f"{_FLAG} must be known to the configuration: give it layer_pattern",
        )
        return
    pattern = config.layer_pattern
    layers = decoder_of(pattern)
    yield from check_rows(_ROWS, config, options, f"with {_FLAG}")
    yield ATTENTION in layers, f"{_FLAG} must have a layer {ATTENTION}, got {pattern}"
    yield (
        len(layers) == config.num_layers,
        f"--num-layers must be {len(layers)} with {_FLAG} {pattern}, got {config.num_layers}",
    )
    depths = predictions_of(pattern)
    yield (
        len(depths) == (config.mtp_num_layers or 0),
        f"--mtp-num-layers ({config.mtp_num_layers}) must count the parts of {_FLAG} behind a /, "
        f"got {pattern}: give one for each depth, for example {pattern}/{ATTENTION}{MLP}",
    )
    every = layers + "".join(depths)
    experts = EXPERTS in every
    yield (
        experts == (config.num_moe_experts is not None),
        f"--num-experts is required with layers {EXPERTS} of {_FLAG}, and has a meaning only with "
        f"them, got {pattern}: give both or none",
    )
    yield from _expert_layers(config, layers)
    if config.transformer_impl == "local":
        for letter, name in _OF_ENGINE.items():
            yield (
                letter not in every,
                f"{_FLAG} must not have {letter} ({name}) with --transformer-impl local, got "
                f"{pattern}: Megatron builds these layers of transformer-engine's parts only; take "
                f"{ATTENTION}, {MLP}, {EXPERTS} and G, or a machine with transformer-engine",
            )
    recurrent = set(every) & set(_RECURRENT)
    yield (
        not recurrent or config.context_parallel_size == 1 or options.cp_layout == "zigzag",
        f"--dsa-cp-layout must be zigzag with layers {' and '.join(sorted(recurrent))} of {_FLAG} "
        f"and context parallelism, got {options.cp_layout}: they expect that order",
    )
    yield from _stage_rules(config, options, selects)


def _expert_layers(config: Any, layers: str):
    freq, mlps = config.moe_layer_freq, [letter for letter in layers if letter in MLP + EXPERTS]
    yield (
        not isinstance(freq, list) or [x == EXPERTS for x in mlps] == [bool(x) for x in freq],
        f"--moe-layer-freq must agree with {_FLAG} {config.layer_pattern}, which says where "
        f"experts are, got {freq}: give --moe-layer-freq 1",
    )


def _stage_rules(config: Any, options: Any, selects: Callable[[int], bool]):
    stages, layers = stages_of(config.layer_pattern), config.layer_pattern
    yield (
        config.pipeline_model_parallel_size == 1 or len(stages) > 1,
        f"{_FLAG} must have | between pipeline stages with --pipeline-model-parallel-size "
        f"{config.pipeline_model_parallel_size}, got {layers}",
    )
    if options.stage != "sparse" or config.dsa_indexer_topk_freq in (None, 1):
        return
    first = 1
    for stage in stages:
        number = first + stage.find(ATTENTION)
        yield (
            ATTENTION not in stage or selects(number),
            f"layer {number} is the first attention of a pipeline stage but reuses the selection "
            "of an earlier layer: index sharing does not cross pipeline stages. Place the | of "
            f"{_FLAG} before layers that select (--dsa-indexer-topk-freq "
            f"{config.dsa_indexer_topk_freq})",
        )
        first += len(stage)
    yield (
        config.recompute_granularity != "full" or "M" not in layers,
        f"--recompute-granularity must not be full with M in {_FLAG} and --dsa-indexer-topk-freq "
        "above 1: Megatron then passes no selection on behind Mamba layers",
    )
