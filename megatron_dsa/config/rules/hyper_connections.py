"""Rules of hyper-connections (``hc_mult``)."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.rules.table import Must, check_rows

_OFFLOADED = "it moves one residual per layer, and streams are the input of several operations"
_ROWS = (
    Must("normalization", "RMSNorm", "the input that a layer reads from its streams has that norm"),
    Must("layernorm_zero_centered_gamma", False, "norms of streams do not add 1 to their weights"),
    Must("cpu_offloading", False, _OFFLOADED, "--cpu-offloading-num-layers"),
    Must("fine_grained_activation_offloading", False, _OFFLOADED),
    Must(
        "cuda_graph_impl", "none",
        "Megatron captures layers whose input has the width of --hidden-size",
    ),
)  # fmt: skip


def hyper_connection_rules(config: Any) -> Iterator[tuple[Any, str]]:
    streams = getattr(config, "hc_mult", 1)
    if streams == 1:
        return
    because = f"with --hc-mult {streams}"
    yield from check_rows(_ROWS, config, case=because)
    yield (
        "layernorm" not in (config.recompute_modules or ()),
        f"--recompute-modules must not name layernorm {because}: it frees the streams before the "
        "write-back reads them; drop it, or recompute whole layers",
    )
    yield (
        not config.variable_seq_lengths or config.pipeline_model_parallel_size == 1,
        f"variable_seq_lengths is not supported {because} and pipeline parallelism: stages "
        "exchange streams of one length; drop it",
    )
    yield from _stream_stage_rules(config, because)


def _stream_stage_rules(config: Any, because: str) -> Iterator[tuple[Any, str]]:
    if config.account_for_embedding_in_pipeline_split:
        stages = config.pipeline_model_parallel_size
        stages *= config.virtual_pipeline_model_parallel_size or 1
        layers = config.num_layers + 1 + bool(config.account_for_loss_in_pipeline_split)
        yield (
            layers // stages > 1,
            "--account-for-embedding-in-pipeline-split must leave the first stage a layer "
            f"{because}: it makes the streams that stages exchange",
        )
    layout = config.pipeline_model_parallel_layout
    stages = getattr(layout, "layout", None)
    # Megatron's parsed layout lists layer kinds per rank and virtual stage.
    empty = stages is not None and all(kind.name != "decoder" for kind in stages[0][0])
    yield (
        not empty,
        f"--pipeline-model-parallel-layout must begin with a decoder layer {because}: the first "
        "layer makes the streams that stages exchange",
    )


def predicts_apart(config: Any) -> bool:
    """Return True if multi-token prediction is not on the last decoder layer's stage."""
    if not config.mtp_num_layers or config.pipeline_model_parallel_size == 1:
        return False
    layout = getattr(config.pipeline_model_parallel_layout, "layout", None)
    if layout is None:
        # Megatron counts the loss as a layer, which may fill the last stage.
        stages = config.pipeline_model_parallel_size
        stages *= config.virtual_pipeline_model_parallel_size or 1
        alone = config.account_for_loss_in_pipeline_split
        layers = config.num_layers + 1 + bool(config.account_for_embedding_in_pipeline_split)
        return bool(alone and layers == stages)
    kinds = [{kind.name for kind in stage} for rank in layout for stage in rank]
    return any("mtp" in stage and "decoder" not in stage for stage in kinds)
