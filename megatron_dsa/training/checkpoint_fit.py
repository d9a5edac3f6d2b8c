"""Checks that a checkpoint fits a run, where Megatron's errors are unclear."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_dsa.errors import ConfigError, require

#: Optimizer states saved with this flag fit any layout.
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_FIT_ANY_LAYOUT = DistributedOptimizer.checkpoint_fully_reshardable_formats
#: Keys of states in the distributed optimizer's layout.
BUCKETS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")
ANEW = "or start the optimizer anew with --no-load-optim"

#: Attributes of the distributed optimizer's layout -> flag.
_LAYOUT = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "the number of virtual pipeline stages",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}


def check_optimizer(
    args: argparse.Namespace, saved: Any, metadata: dict[str, Any], directory: Path
) -> None:
    """Check that a checkpoint's optimizer state has this run's optimizer and layout.

    ``metadata``: Megatron's content metadata (``distrib_optim_sharding_type``).
    """
    if args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", saved is None):
        return
    for holds, message in _rules(args, saved, metadata, f"as in checkpoint {directory}"):
        require(holds, f"{message}, {ANEW}")


def check_shapes(sharded_state_dict, checkpoint_dir, available: dict) -> None:
    """Check that tensors in the checkpoint, ``available`` by key, have this run's shapes."""
    for _, _, entry in nested_entries(list(sharded_state_dict.values())):
        bucket = BUCKETS.match(entry.key)
        saved = available.get(entry.key)
        if isinstance(entry, ShardedTensor):
            same = saved is not None and saved.global_shape == entry.global_shape
        else:
            same = saved is not None or not bucket
        if same or getattr(entry, "allow_shape_mismatch", False):
            continue
        if bucket:
            raise ConfigError(
                f"checkpoint {checkpoint_dir} holds the distributed optimizer's states in other "
                f"buckets than this run ({entry.key}), saved without {RESHARDABLE}: give the "
                "--ddp-bucket-size, --ddp-num-buckets, --overlap-grad-reduce, precision and "
                f"parallel sizes of then, {ANEW}"
            )
        if saved is not None:
            raise ConfigError(
                f"{entry.key} is {list(saved.global_shape)} in checkpoint {checkpoint_dir}, and "
                f"{list(entry.global_shape)} in this run: compare the model flags with those of "
                "the checkpoint"
            )


def nested_entries(content):
    if not isinstance(content, dict | list):
        return
    for name, entry in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(entry, ShardedBase):
            yield content, name, entry
        else:
            yield from nested_entries(entry)


def say_layout(args: argparse.Namespace) -> None:
    if (
        args.use_distributed_optimizer
        and not args.no_save_optim
        and args.ckpt_format == "torch_dist"
        and not args.dist_ckpt_optim_fully_reshardable
    ):
        print(
            "> the optimizer's state in checkpoints of this run fits any number of data-parallel "
            f"ranks, and no other tensor, pipeline or expert parallelism: {RESHARDABLE} saves it "
            "for any (docs/guide/checkpoints.md)"
        )


def _rules(args, saved, metadata, where: str) -> Iterator[tuple[bool, str]]:
    then, now = getattr(saved, "optimizer", args.optimizer), args.optimizer
    then = "muon" if then == "dist_muon" else then
    yield (
        then == now,
        f"--optimizer must be {then}, {where}, got {now}: the two keep other states. Give it",
    )
    scalars = [getattr(x, "muon_scalar_optimizer", None) for x in (saved, args)]
    yield (
        "muon" not in now or scalars[0] in (None, scalars[1]),
        f"--muon-scalar-optimizer must be {scalars[0]}, {where}, got {scalars[1]}: the two keep "
        "other states. Give it",
    )
    # The layer-wise optimizer has plain states.
    was = getattr(saved, "use_distributed_optimizer", False)
    yield (
        was == args.use_distributed_optimizer,
        f"--use-distributed-optimizer must {'' if was else 'not '}be given, {where}: states of the "
        "plain and of the distributed optimizer do not fit each other. "
        f"{'Add' if was else 'Drop'} it",
    )
    sharding = metadata.get("distrib_optim_sharding_type")
    if was and (sharding is None or sharding in _FIT_ANY_LAYOUT):
        return
    kinds = [getattr(x, "hybrid_layer_pattern", None) is None for x in (saved, args)]
    yield (
        not was or kinds[0] == kinds[1],
        f"--hybrid-layer-pattern must {'not ' if kinds[0] else ''}be given, {where}: states of the "
        f"distributed optimizer were saved without {RESHARDABLE} and have no names. Resume like "
        "that with it until it has saved, then change",
    )
    precision = next((f"--{x}" for x in ("fp16", "bf16") if getattr(saved, x, False)), None)
    yield (
        bool(precision) == (args.fp16 or args.bf16),
        f"{precision or '--bf16 and --fp16'} must {'' if precision else 'not '}be given, {where}: "
        "the optimizer keeps fp32 copies of 16-bit weights only. "
        f"{'Add' if precision else 'Drop'} it",
    )
    for name, flag in _LAYOUT.items() if was else ():
        if not hasattr(saved, name):
            continue
        before, after = getattr(saved, name), getattr(args, name, None)
        yield (
            _plain(before, saved) == _plain(after, args),
            f"{flag} must be {before}, {where}, got {after}: the distributed optimizer's states "
            f"were saved without {RESHARDABLE} and fit their own layout only. Resume with that "
            f"layout and {RESHARDABLE} until it has saved, then change it",
        )


def _plain(value: Any, args: Any) -> Any:
    """Normalise a layout setting; no virtual stages are one stage."""
    if isinstance(value, str):
        stages = args.pipeline_model_parallel_size
        return PipelineParallelLayerLayout.from_str(value, stages).layout
    return value or 1
