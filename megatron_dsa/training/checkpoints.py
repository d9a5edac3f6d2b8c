"""Loading of checkpoints from an earlier stage or a dense MLA model.

Later stages initialise the indexers that ``dense`` checkpoints lack. A change of stage restarts the
optimizer and initialises missing adapters. Any other missing tensor is an error.
"""

import argparse
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.training import checkpointing, print_rank_0
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.model import is_adapter_parameter, is_indexer_parameter
from megatron_dsa.config.rules.lora import linears_named, rank_and_alpha
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.patches import install, install_checkpoint_repairs
from megatron_dsa.training.checkpoint_files import check_files, read_tracker, reading, saved_name
from megatron_dsa.training.checkpoint_fit import (
    check_optimizer,
    check_shapes,
    nested_entries,
    say_layout,
)
from megatron_dsa.training.checkpoint_names import (
    OtherKind,
    is_held,
    other_kind,
    same_under_another_name,
)
from megatron_dsa.training.checkpoint_parts import check_parts
from megatron_dsa.training.launching import this_rank


def prepare_loading(args: argparse.Namespace) -> AbstractContextManager:
    """Set the loading flags for a change of stage; return a context manager for the run.

    Inside the context, Megatron loads checkpoints without indexers, and GPT checkpoints for hybrid
    models and vice versa.
    """
    install_checkpoint_repairs()
    install("tracker file", read_tracker)
    directory = checkpoint_directory(args)
    pattern = getattr(args, "hybrid_layer_pattern", None)
    functions: dict[str, Any] = {"load": functools.partial(load, pattern=pattern)}
    if (base := _base_of_saves(args, directory)) is not None:
        functions["save"] = load_extra("lora.base", "--lora-rank").saving_without(
            base, args.lora_base
        )
    # Imported weights have no optimizer.
    if directory is not None and directory.name != "release":
        with reading(directory):
            common = dist_checkpointing.load_common_state_dict(str(directory))
        saved = common.get("args")
        was, now = _what_is_trained(saved), _what_is_trained(args)
        if {was, now} == {"warmup (everything)", "sparse"}:
            was = now
        if was != now and not args.finetune and not args.no_load_optim:
            args.no_load_optim = True
            if this_rank() == 0:
                print(
                    f"> checkpoint {directory} is of stage {was}, this run of stage {now}: the "
                    "optimizer starts anew"
                )
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        if args.load and directory.parent == Path(args.load):
            check_optimizer(args, saved, metadata or {}, directory)
    if this_rank() == 0 and args.save:
        say_layout(args)
    if directory is not None and this_rank() == 0:
        entries = entries_of(directory)
        say_dropped_indexers(args, directory, entries)
        check_hash_layers(args, directory, entries)
        check_adapters(args, directory, entries)
        check_parts(args, entries, _saved_args(directory), directory)
    return _loading_by(functions)


@contextmanager
def _loading_by(functions: dict[str, Any]) -> Iterator[None]:
    # Megatron's conversion to hybrid models handles "*" layers only.
    names: dict[str, Any] = {"_maybe_setup_gpt_to_hybrid_load": lambda *_: (None, False)}
    with (
        mock.patch.multiple(checkpointing, **names),
        mock.patch.multiple(checkpointing.dist_checkpointing, **functions),
    ):
        yield


def _base_of_saves(args: argparse.Namespace, directory: Path | None) -> Path | None:
    """Print and return the base checkpoint that this run's checkpoints refer to.

    Also set ``args.lora_base``, which checkpoints save.
    """
    args.lora_base, reference = None, None
    if getattr(args, "lora_rank", None) is None:
        return None
    extra = load_extra("lora.base", "--lora-rank")
    if directory is not None and (reference := _saved_base(directory)) is not None:
        extra.look_below(reference, args.pretrained_checkpoint)
    if not args.save or args.ckpt_format != "torch_dist":
        return None
    base = None if directory is None else base_of(directory)
    said = "no --pretrained-checkpoint has them (import-hf writes one)"
    if directory is not None and base is None:
        said = f"{directory} lies in --save, where it may be deleted"
        if directory.parent.resolve() != Path(args.save).resolve():
            reference, base = extra.describe(directory), directory
    args.lora_base = reference
    if this_rank() == 0:
        print(
            f"> checkpoints of this run hold the frozen weights also: {said}"
            if base is None
            else f"> checkpoints of this run hold no frozen weights: keep their base {base}"
        )
    return base


def say_dropped_indexers(args: argparse.Namespace, directory: Path, entries: Iterable[str]) -> None:
    if _stage_of(args) != "dense":
        return
    indexers = [
        key for key in entries if is_indexer_parameter(key) and not key.startswith("optimizer")
    ]
    if indexers:
        print(
            f"> checkpoint {directory} has indexers, stage dense has none: {len(indexers)} tensors "
            "are dropped, and what this run saves will not hold them"
        )


def check_hash_layers(
    args: argparse.Namespace, directory: Path, entries: dict[str, ShardedBase]
) -> None:
    """Check that a checkpoint has the hash-routing tables that the model loads."""
    shapes = [e.global_shape for key, e in entries.items() if key.endswith(".router.tid2eid")]
    given, where = getattr(args, "moe_hash_layers", 0), f"as in checkpoint {directory}"
    require(
        len(shapes) == given,
        f"--moe-hash-layers must be {len(shapes)}, {where}, got {given}: layers would choose "
        "experts in another way than they learned to",
    )
    for rows, topk in shapes[:1]:
        require(
            topk == args.moe_router_topk,
            f"--moe-router-topk must be {topk}, {where}, got {args.moe_router_topk}: the tables of "
            "hash routing hold so many experts per token",
        )
        vocabulary = args.padded_vocab_size or calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        )
        require(
            rows == vocabulary,
            f"--padded-vocab-size must be {rows}, {where}, got {vocabulary}: the tables of hash "
            "routing have a row per token id. It depends on --tensor-model-parallel-size: give "
            f"--padded-vocab-size {rows}",
        )


def check_adapters(args: argparse.Namespace, directory: Path, entries: Iterable[str]) -> None:
    """Check that a run keeps all adapters (LoRA) of its checkpoint."""
    found = [
        key for key in entries if is_adapter_parameter(key) and not key.startswith("optimizer")
    ]
    if not found:
        return
    saved = dist_checkpointing.load_common_state_dict(str(directory))["args"]
    rank, alpha = rank_and_alpha(saved)
    flags = f"--lora-rank {rank} --lora-alpha {alpha:g} --lora-targets "
    flags += " ".join(saved.lora_targets)
    require(
        getattr(args, "lora_rank", None) is not None,
        f"checkpoint {directory} has adapters, which this run would leave out: give {flags}, or "
        "merge them into the weights with python -m megatron_dsa export-hf",
    )
    require(
        rank_and_alpha(args) == (rank, alpha),
        f"--lora-rank and --lora-alpha must be as in checkpoint {directory}: give {flags}",
    )
    kept = linears_named(args, tuple(args.lora_targets))
    dropped = [x for x in linears_named(saved, tuple(saved.lora_targets)) if x not in kept]
    require(
        not dropped,
        f"checkpoint {directory} has adapters of {', '.join(dropped)}, which this run would leave "
        f"out: give {flags}",
    )
    require(
        args.dsa_stage == "dense"
        or args.dsa_indexer_loss_coeff
        or not any(map(is_indexer_parameter, found)),
        f"--dsa-indexer-loss-coeff must not be 0: checkpoint {directory} has adapters of indexers, "
        "which this run would leave out",
    )


def _what_is_trained(args) -> str:
    """Describe the trained parameters, which an optimizer state must match."""
    trained = _stage_of(args)
    if getattr(args, "lora_rank", None) is None:
        return trained
    linears = ", ".join(linears_named(args, tuple(args.lora_targets)))
    return f"{trained} (adapters of rank {args.lora_rank} of {linears})"


def _stage_of(args) -> str:
    stage = getattr(args, "dsa_stage", None)
    if stage is None:  # plain Megatron saves no dsa_stage
        bundled = getattr(args, "experimental_attention_variant", None) == "dsa"
        stage = "sparse" if bundled else "dense"
    if getattr(args, "csa_dense_mode", False):  # earlier versions saved csa_dense_mode
        stage = "dense"
    if stage == "warmup":
        return "warmup (everything)" if args.dsa_warmup_train_all else "warmup (indexers)"
    if stage == "sparse" and not args.dsa_indexer_loss_coeff:
        return "sparse (without the indexers)"
    return stage


def checkpoint_directory(args, step_flag: str = "--ckpt-step") -> Path | None:
    """Return the distributed checkpoint that Megatron will load, or ``None``.

    Raises:
        ConfigError: the checkpoint is missing or damaged; the message names ``step_flag``.
    """
    for root in filter(None, (args.load, args.pretrained_checkpoint)):
        name = saved_name(Path(root), args.ckpt_step)
        if name is None:
            continue
        directory = Path(root) / name
        if this_rank() == 0:
            check_files(directory, step_flag)
        if dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
            return directory
    return None


def distributed_checkpoint(root: str, step: int | None, flag: str) -> Path:
    """Return the directory of a run's latest checkpoint, or of iteration ``step``.

    Raises:
        ConfigError: no such checkpoint exists; the message names ``flag``, which gave ``root``.
    """
    directory = checkpoint_directory(
        argparse.Namespace(load=root, pretrained_checkpoint=None, ckpt_step=step), "--step"
    )
    # Imported weights have no steps; Megatron ignores step 0.
    if directory is None or (step is not None and directory.name != f"iter_{step:07d}"):
        which = "" if step is None else f" of --step {step}"
        raise ConfigError(
            f"{flag} {root} holds no distributed checkpoint{which}: name the directory that "
            "--save of the run was, with --ckpt-format torch_dist, and an iteration that it saved"
        )
    return directory


def load(sharded_state_dict, checkpoint_dir, *args, pattern: str | None = None, **kwargs) -> Any:
    """Extend ``dist_checkpointing.load`` to checkpoints without indexers, with other names, or of
    adapters only.
    """
    with reading(Path(checkpoint_dir)):
        available = redirect(sharded_state_dict, checkpoint_dir, pattern)
        check_shapes(sharded_state_dict, checkpoint_dir, available)
        if (base := base_of(checkpoint_dir)) is None:
            loaded = serialization.load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            kind = other_kind(loaded.get("args"), pattern, checkpoint_dir)
            if kind is not None and "args" in loaded:
                loaded["args"].num_layers = kind.num_layers
            return loaded
        extra = load_extra("lora.base", "--lora-rank")
        return extra.load(sharded_state_dict, checkpoint_dir, base, *args, **kwargs)


def _saved_args(checkpoint_dir) -> Any:
    return dist_checkpointing.load_common_state_dict(str(checkpoint_dir)).get("args")


def _saved_base(checkpoint_dir) -> dict[str, str | None] | None:
    return getattr(_saved_args(checkpoint_dir), "lora_base", None)


def base_of(checkpoint_dir) -> Path | None:
    """Return the base of an adapter checkpoint, ``None`` for other checkpoints.

    Raises:
        ConfigError: the base is missing or was changed.
    """
    if (reference := _saved_base(checkpoint_dir)) is None:
        return None
    return load_extra("lora.base", "--lora-rank").find(reference, checkpoint_dir)


def stored_entries(checkpoint_dir) -> dict[str, ShardedBase]:
    install_checkpoint_repairs()
    return {entry.key: entry for entry in load_sharded_metadata(str(checkpoint_dir)).values()}


def entries_of(checkpoint_dir) -> dict[str, ShardedBase]:
    """Return :func:`stored_entries` and the adapters' base weights."""
    entries = stored_entries(checkpoint_dir)
    if (base := base_of(checkpoint_dir)) is None:
        return entries
    frozen = load_extra("lora.base", "--lora-rank").frozen_entries(base)
    args = _saved_args(checkpoint_dir)
    # The adapted model may lack parts of its base.
    without_mtp, dense = not args.mtp_num_layers, _stage_of(args) == "dense"
    return {
        key: entry
        for key, entry in frozen.items()
        if not (without_mtp and key.startswith("mtp."))
        and not (dense and is_indexer_parameter(key))
    } | entries


def redirect(
    sharded_state_dict, checkpoint_dir, pattern: str | None = None
) -> dict[str, ShardedBase]:
    """Rename entries of models and optimizers to their names in a checkpoint; print changes.

    Remove indexers' entries if the checkpoint has none. Return the checkpoint's entries by key.
    ``pattern`` is this run's layer pattern, ``None`` for a GPT.

    Raises:
        ConfigError: the checkpoint lacks other entries.
    """
    available = entries_of(checkpoint_dir)
    kind = other_kind(_saved_args(checkpoint_dir), pattern, checkpoint_dir)
    _redirect_models(sharded_state_dict, checkpoint_dir, available, kind)
    _redirect_optimizers(sharded_state_dict, checkpoint_dir, available, kind)
    return available


def _redirect_models(
    sharded_state_dict, checkpoint_dir, available: dict, kind: OtherKind | None = None
) -> None:
    has_indexers = any(is_indexer_parameter(key) for key in available)
    fresh, missing, renamed, adapters = [], [], [], []
    models = [part for name, part in sharded_state_dict.items() if name.startswith("model")]
    for parent, name, entry in list(nested_entries(models)):
        # In the other model kind, this name may mean another layer.
        if kind is None and is_held(entry, available):
            continue
        if name.endswith("_extra_state"):
            # Training recomputes these quantisation statistics.
            del parent[name]
        elif (found := same_under_another_name(entry, available, kind)) is not None:
            parent[name] = found
            renamed.append(entry.key)
        elif is_adapter_parameter(entry.key):
            adapters.append(entry.key)
            del parent[name]
        elif is_indexer_parameter(entry.key) and not has_indexers:
            fresh.append(entry.key)
            del parent[name]
        else:
            missing.append(entry.key)
    _check_pools([entry.key for *_, entry in nested_entries(models)], available, checkpoint_dir)
    if missing:
        raise ConfigError(
            f"checkpoint {checkpoint_dir} does not hold {', '.join(sorted(set(missing)))}; only "
            "indexers may be missing, and then all of them. Compare the model flags with those of "
            "the checkpoint."
        )
    if fresh:
        print_rank_0(
            f"> checkpoint {checkpoint_dir} has no indexers: {len(fresh)} tensors keep their "
            "initial values"
        )
    if adapters:
        print_rank_0(
            f"> checkpoint {checkpoint_dir} does not hold {len(adapters)} tensors of adapters: "
            "they keep their initial values"
        )
    if renamed:
        print_rank_0(f"> {len(renamed)} tensors of the checkpoint go by another name there")


def _check_pools(keys: list[str], available: Iterable[str], checkpoint_dir) -> None:
    here, there = ([key for key in each if is_indexer_parameter(key)] for each in (keys, available))
    pooled = any(key.endswith("indexer.pool_ape") for key in there)
    require(
        not (here and there) or pooled == any(key.endswith("indexer.pool_ape") for key in here),
        f"--dsa-indexer-pool-size must be {'above 1' if pooled else '1'}, as in checkpoint "
        f"{checkpoint_dir}: an index key is of {'a pool' if pooled else 'a token'} there",
    )


def _redirect_optimizers(
    sharded_state_dict, checkpoint_dir, available: dict, kind: OtherKind | None = None
) -> None:
    missing = []
    for parent, name, entry in list(nested_entries(sharded_state_dict.get("optimizer"))):
        if ".state." not in entry.key or (kind is None and is_held(entry, available)):
            continue
        if (found := same_under_another_name(entry, available, kind)) is not None:
            parent[name] = found
        elif not isinstance(entry, ShardedObject):
            missing.append(entry.key)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"checkpoint {checkpoint_dir} does not hold the optimizer states "
            f"{', '.join(sorted(missing)[:3])}{more}: it was written with another optimizer or by "
            "other trained parameters. Pass --no-load-optim to start the optimizer anew."
        )
