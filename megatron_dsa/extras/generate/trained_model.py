"""A trained model in one process, rebuilt from its checkpoint's arguments.

The saved arguments become the parser's defaults, so flags and all checks still apply.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import arguments, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.config.training_config import TokenizerConfig

from megatron_dsa.arguments import add_dsa_arguments
from megatron_dsa.config.transformer import CSATransformerConfig
from megatron_dsa.errors import require
from megatron_dsa.patches import cpu_host
from megatron_dsa.training.checkpoint_names import arguments_of_gpt
from megatron_dsa.training.checkpoints import distributed_checkpoint, prepare_loading
from megatron_dsa.training.launching import use_compiled_dataset_helper, world_size
from megatron_dsa.training.model import embedding_ranks
from megatron_dsa.training.preset_flags import preset_flags
from megatron_dsa.training.quiet_output import quiet_output
from megatron_dsa.training.setup import model_config_from_args

#: Configuration fields that describe a run, not its model.
_OF_THE_RUN = (
    *("transformer_impl", "apply_rope_fusion", "masked_softmax_fusion", "bias_dropout_fusion"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
    *("moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap"),
    *("memory_efficient_layer_norm", "persist_layer_norm", "attention_backend"),
    *("moe_enable_deepep", "moe_router_force_biased", "qk_clip"),
    *("delay_offload_until_cuda_graph", "symmetric_ar_type", "use_te_activation_func"),
)
_KINDS_OF_THE_RUN = (
    *("recompute_", "cuda_graph", "fp8", "fp4", "inference_", "cpu_offloading"),
    # These fields need transformer-engine.
    *("moe_router_padding_", "fine_grained_", "offload_"),
)
#: Model arguments that are not configuration fields.
_MODEL = (
    *("seq_length", "max_position_embeddings", "num_experts", "swiglu", "squared_relu"),
    "hybrid_layer_pattern",
    *("bias_swiglu_fusion", "position_embedding_type", "rotary_base", "rotary_percent"),
    *("untie_embeddings_and_output_weights", "padded_vocab_size", "make_vocab_size_divisible_by"),
    *("bf16", "fp16", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("dsa_stage", "dsa_latent_norm_epsilon", "dsa_csa_teacher", "dsa_indexer_pool_size"),
    "dsa_output_gate",
    *("dsa_indexer_numerics", "dsa_kv_rounding", "lora_rank", "lora_alpha", "lora_targets"),
)
READING = (
    *("seed", "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "lr"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "dataloader_type"),
    *("dataloader_inter_document_masking", "data_cache_path", "mid_level_dataset_surplus"),
    *("dsa_sft", "dsa_sft_long"),
)
_DATA = (
    *("data_path", "split", "train_data_path", "valid_data_path", "test_data_path", "mock_data"),
    *("data_args_path", "per_split_data_args_path", "eval_iters", "eval_interval"),
    *("eval_global_batch_size", "eval_micro_batch_size", "full_validation"),
    "multiple_validation_sets",
)
_SETTINGS = (
    *("--skip-train", "--no-load-optim", "--no-load-rng", "--ckpt-format", "torch_dist"),
    *("--dsa-health-tokens", "0"),
)
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@dataclass(frozen=True)
class TrainedModel:
    """A loaded model with its validated arguments, checkpoint and iteration."""

    args: argparse.Namespace
    chunks: list[torch.nn.Module]
    directory: Path
    step: int


def saved_arguments(directory: Path) -> argparse.Namespace:
    saved = dist_checkpointing.load_common_state_dict(str(directory)).get("args")
    require(
        saved is not None,
        f"--load: {directory} does not say how its model was trained (imported weights do not): "
        "give the checkpoint of a training run",
    )
    return saved


def taken_over(saved: argparse.Namespace, data: bool) -> dict[str, Any]:
    """Select the arguments of the model and data reader; with ``data`` also of the data sets."""
    saved = arguments_of_gpt(saved)
    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    names = [
        field.name
        for field in dataclasses.fields(CSATransformerConfig)
        if field.name not in parallel | set(_OF_THE_RUN)
        and not field.name.startswith(_KINDS_OF_THE_RUN)
        and "pipeline" not in field.name
    ]
    names += [field.name for field in dataclasses.fields(TokenizerConfig)]
    names += [*_MODEL, *READING, *(_DATA if data else ())]
    found = {name: getattr(saved, name) for name in names if hasattr(saved, name)}
    if found.get("hybrid_layer_pattern") is not None:
        found["hybrid_layer_pattern"] = found["hybrid_layer_pattern"].replace("|", "")
    if found.get("train_samples") is not None:
        found.pop("train_iters", None)
    return found


def adding(defaults: dict[str, Any]) -> Callable[[argparse.ArgumentParser], Any]:
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_dsa_arguments(parser)
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: x for name, x in defaults.items() if name in known})
        return parser

    return add_arguments


@contextlib.contextmanager
def trained_model(
    load: str, step: int | None = None, flags: list[str] | None = None
) -> Iterator[TrainedModel]:
    """Yield a loaded model; suppress Megatron's output.

    Args:
        load: value of ``--save`` in the training.
        step: iteration; ``None``: the latest.
        flags: Megatron's flags of the data to evaluate on; ``None``: the training's data.
    """
    require(
        world_size() == 1,
        f"WORLD_SIZE must be 1, got {world_size()}: this command takes one process. Several "
        "evaluate by python -m megatron_dsa.pretrain with --skip-train",
    )
    directory = distributed_checkpoint(load, step, "--load")
    defaults = taken_over(saved_arguments(directory), data=flags is None)
    argv = ["megatron_dsa", *_SETTINGS, "--load", load, *(flags or ())]
    if step is not None:
        argv += ["--ckpt-step", str(step)]

    if cpu_host.needed():
        cpu_host.activate()
    use_compiled_dataset_helper()
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with contextlib.redirect_stdout(io.StringIO()), quiet_output():
            preset_flags(argv)
            with mock.patch.object(sys, "argv", argv), mock.patch.dict(os.environ, _ALONE):
                args = arguments.parse_and_validate_args(extra_args_provider=adding(defaults))
                chunks = _load(args)
        yield TrainedModel(args, chunks, directory, args.iteration)
    finally:
        training.destroy_global_state()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        logging.disable(before)


def _load(args: argparse.Namespace) -> list[torch.nn.Module]:
    model = model_config_from_args(args)
    training.initialize_megatron(
        get_embedding_ranks=embedding_ranks(model), store=torch.distributed.HashStore()
    )
    with prepare_loading(args):
        chunks, _, _ = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(args, model),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    for chunk in chunks:
        chunk.eval()
    return chunks
