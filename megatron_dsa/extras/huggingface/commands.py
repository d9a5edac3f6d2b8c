"""Commands ``import-hf`` and ``export-hf``: one process without GPU converts file by file."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_dsa.config.model import (
    DSAOptions,
    is_adapter_parameter,
    is_indexer_parameter,
    linears_with_adapters,
)
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.adapters import export_adapter
from megatron_dsa.extras.huggingface.build import empty_model, widest_dtype
from megatron_dsa.extras.huggingface.config_json import TEXT, HFModel, read_config
from megatron_dsa.extras.huggingface.convert import Import, export_model, open_checkpoint
from megatron_dsa.extras.huggingface.features import (
    check_features,
    described_features,
    features_to_build,
)
from megatron_dsa.extras.huggingface.files import INDEX, SINGLE
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, PREDICTION
from megatron_dsa.extras.huggingface.precision import ReleasedPrecision
from megatron_dsa.extras.huggingface.streaming import StoredParameters, write_checkpoint
from megatron_dsa.extras.huggingface.trained_config import check_trained
from megatron_dsa.training.checkpoint_files import RELEASE, TRACKER
from megatron_dsa.training.checkpoints import (
    base_of,
    distributed_checkpoint,
    entries_of,
    redirect,
)
from megatron_dsa.training.files.whole import WholeFiles
from megatron_dsa.training.one_process import one_process


def import_hf(arguments: argparse.Namespace) -> int:
    """Write a Megatron release checkpoint, which has no optimizer state."""
    output = Path(arguments.output)
    if any(os.path.lexists(output / name) for name in (TRACKER, RELEASE)):
        raise ConfigError(f"--output {output} holds a checkpoint already: choose another directory")
    file_bytes = int(arguments.shard_gb * 1e9)
    hf = read_config(arguments.input)
    reader = open_checkpoint(arguments.input, hf)
    names = reader.names()
    features = features_to_build(hf, reader, arguments.without)
    stage = "sparse" if any(is_indexer_parameter(name) for name in names) else "dense"
    locations = [hf.names.locate(name, hf.num_layers) for name in names]
    mtp = any(x is not None and x.is_mtp for x in locations)
    mtp = mtp and PREDICTION not in arguments.without
    with one_process():

        def empty(dtype: torch.dtype | None = None):
            model = empty_model(hf, stage, mtp, dtype, features)
            return model, Import(model, arguments.input, without=arguments.without)

        model, source = empty()
        if hf.dtype is None:
            model, source = empty(_noted(widest_dtype(model, source.stored_dtype)))
        chunk: Any = model
        state = chunk.sharded_state_dict()
        objects = {name: x for name, x in state.items() if isinstance(x, ShardedObject)}
        tensors = {name: x for name, x in state.items() if name not in objects}

        def values(name: str):
            # A missing router bias starts at zero.
            fresh = name in source.report.fresh
            return torch.zeros(tensors[name].data.shape) if fresh else source.values(name)

        others = {"model": objects, "checkpoint_version": 3.0, "iteration": 0}
        with WholeFiles(output) as files:
            release = files.path(RELEASE)
            release.mkdir()
            write_checkpoint(release, tensors, values, others, file_bytes)
            source.nonfinite.check()
            files.path(TRACKER).write_text(RELEASE)
    source.log()
    print(f"{len(tensors)} tensors of {arguments.input} in {output}; load them with")
    print(f"  --load {output} --dsa-stage {stage}")
    if left := sorted(described_features(hf) - features):
        print(f"  with the flags that the command flags prints, --without {' '.join(left)}")
    if stage == "dense":
        print(
            "  or --dsa-stage warmup: the checkpoint has no indexers, a run starts with fresh ones"
        )
    return 0


def export_hf(arguments: argparse.Namespace) -> int:
    """Write a Hugging Face checkpoint with adapters merged, or only the adapters."""
    file_bytes = int(arguments.shard_gb * 1e9)
    directory = distributed_checkpoint(arguments.input, arguments.step, "--input")
    hf = read_config(arguments.config)
    _note(*hf.remarks)
    if TEXT in hf.raw:
        _note("the text model is written; copy the tensors of the vision tower from the release")
    keys = entries_of(directory)
    has_indexer = any(map(is_indexer_parameter, keys))
    found = {True: "indexers", False: "no indexers"}
    require(
        hf.has_indexer == has_indexer,
        f"--config is of a {hf.raw['model_type']} with {found[hf.has_indexer]}, and {directory} "
        f"has {found[has_indexer]}: give the config.json of the model that was trained",
    )
    features = _features_of(keys)
    check_features(hf, features, str(directory))
    mtp = any(key.startswith("mtp.") for key in keys)
    stage = "sparse" if hf.has_indexer else "dense"
    adapters = _adapters_of(directory, keys, stage)
    require(
        adapters or not arguments.adapter,
        f"--adapter: {directory} has no adapters; drop it to export the model",
    )
    require(
        not (arguments.adapter and arguments.quantise),
        "--quantise has no meaning with --adapter: adapters are not quantised; drop one of them",
    )
    precision = _precision(arguments, hf)
    if mtp and not hf.mtp_layers:
        _note(
            "layers of multi-token prediction are left out: by config.json "
            "(num_nextn_predict_layers) the model has none"
        )
    with one_process():
        _note(*check_trained(directory, hf, arguments.config))
        stored = StoredParameters(directory, base_of(directory))

        def empty(dtype: torch.dtype | None = None):
            model: Any = empty_model(hf, stage, mtp, dtype, features, **adapters)
            state = {"model": model.sharded_state_dict()}
            redirect(state, str(directory))
            return model, state["model"]

        model, entries = empty()
        dtype = widest_dtype(model, lambda name: stored.dtype(entries[name]))
        if hf.dtype is None:
            model, entries = empty(_noted(dtype))
        elif torch.promote_types(dtype, hf.dtype) != hf.dtype:
            _note(f"weights are stored as {dtype} and rounded to {hf.dtype}, as config.json says")
        if arguments.adapter:
            return _export_adapter(
                arguments, model, hf, lambda name, like: stored.read(entries[name]).to(like.dtype)
            )
        export_model(
            model,
            arguments.output,
            hf.raw,
            shard_bytes=file_bytes,
            values=lambda name, _like: stored.read(entries[name]),
            precision=precision,
        )
    print(f"{directory} in {arguments.output}")
    if precision is not None:
        print(f"  {precision.kept} of {precision.blocks} quantised blocks are those of the release")
    return 0


def _export_adapter(arguments: argparse.Namespace, model: Any, hf: HFModel, values) -> int:
    folder, there = _release(arguments)
    base = str(folder.resolve()) if there else None
    left = export_adapter(model, arguments.output, hf.names, base, values)
    if left:
        _note(
            f"{left} tensors of multi-token prediction are left out, PEFT's models have no such "
            "layers"
        )
    if any(x.startswith("mlp.") for x in linears_with_adapters(model.config)):
        _note(
            "PEFT 0.21 takes adapters of MLPs for those of routed experts, also in models of dense "
            "layers (docs/guide/lora.md): merge them, without --adapter"
        )
    print(f"adapters of {arguments.input} in {arguments.output}")
    return 0


def _adapters_of(directory: Path, keys: Iterable[str], stage: Any) -> dict[str, Any]:
    if not any(map(is_adapter_parameter, keys)):
        return {}
    saved = dist_checkpointing.load_common_state_dict(str(directory))["args"]
    options = DSAOptions(
        stage=stage,
        lora_rank=saved.lora_rank,
        lora_alpha=saved.lora_alpha,
        lora_targets=saved.lora_targets,
        latent_norm_epsilon=saved.dsa_latent_norm_epsilon,
    )
    # Without a loss coefficient a model has no indexer adapters.
    return {"dsa": options, "dsa_indexer_loss_coeff": saved.dsa_indexer_loss_coeff}


def _features_of(keys: Iterable[str]) -> set[str]:
    ends = {HYPER_CONNECTIONS: "hc_attn_fn", HASH_ROUTING: "router.tid2eid"}
    keys = [key for key in keys if key.startswith("decoder.")]
    return {x for x, end in ends.items() if any(key.endswith(end) for key in keys)}


def _precision(arguments: argparse.Namespace, hf: HFModel) -> ReleasedPrecision | None:
    if arguments.quantise is None:
        return None
    folder, there = _release(arguments)
    release = open_checkpoint(folder, hf) if there else None
    precision = ReleasedPrecision(hf, arguments.quantise, release)
    if not precision.uses_release:
        _note(
            f"no quantised checkpoint lies in {folder}, where --config is: every block gets a "
            "scale of its own, and released weights do not come back to the byte"
        )
    return precision


def _release(arguments: argparse.Namespace) -> tuple[Path, bool]:
    path = Path(arguments.config)
    folder = path if path.is_dir() else path.parent
    return folder, any((folder / name).is_file() for name in (INDEX, SINGLE))


def _note(*notes: str) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _noted(dtype: torch.dtype) -> torch.dtype:
    _note(
        f"config.json has no dtype (torch_dtype): weights are written as {dtype}, the widest dtype "
        "in which they are stored"
    )
    return dtype
