"""Conversion: a Hugging Face checkpoint into a Megatron model, and back.

The model's own parameters say what is read. Each is filled with its slice of the checkpoint's
tensors, one after the other: a rank of a parallel model reads no more than what it holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dsa.config import uses_indexer
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.huggingface.conventions import HFModel, check_model, parse_config, read_config
from megatron_dsa.huggingface.files import CheckpointReader, CheckpointWriter
from megatron_dsa.huggingface.names import (
    MTP_COPIES,
    Entry,
    Split,
    is_known,
    layer_of,
    match,
)
from megatron_dsa.huggingface.ranks import Place, assemble, global_name, part
from megatron_dsa.stages import is_indexer_parameter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What a conversion did: parameters ``filled``, ``fresh`` (kept their initial values),
    ``rounded`` (to a narrower dtype), and tensors of the checkpoint that were ``unused``."""

    filled: tuple[str, ...]
    fresh: tuple[str, ...]
    rounded: tuple[str, ...]
    unused: tuple[str, ...]


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a model by Megatron's names."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Layers of transformer-engine keep quantisation statistics as extra state.
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            yield name, tensor


def import_model(model: torch.nn.Module, directory: str | Path, place: Place = Place()) -> Report:
    """Fill a Megatron GPT model with the weights of a Hugging Face checkpoint.

    A checkpoint without indexers leaves those of the model as they are; all else has to be there.

    Args:
        model: ``GPTModel`` (unwrapped); filled in place, in its own dtype.
        directory: config.json and safetensors files.
        place: of this rank.

    Raises:
        ConfigError: config.json is not understood or describes another model, tensors are
            missing or left over, or shapes differ. The model may be filled in part by then.
    """
    hf = read_config(directory)
    check_model(hf, model.config)
    reader = CheckpointReader(directory, hf.block, hf.dtype)
    names = set(reader.names())
    if unknown := sorted(name for name in names if not is_known(name)):
        raise ConfigError(
            f"checkpoint {directory}: {len(unknown)} tensors have no place in Megatron's model, "
            f"the first is {unknown[0]}; give them lines in megatron_dsa/huggingface/names.py"
        )
    has_indexers = any(is_indexer_parameter(name) for name in names)
    filled, fresh, rounded, used = [], [], [], set()
    for name, tensor in model_tensors(model):
        found = match(global_name(name, place), hf.num_layers)
        if is_indexer_parameter(name) and not has_indexers:
            fresh.append(name)
            continue
        values = _values(reader, found.entry, found.hf, tuple(tensor.shape), place)
        if torch.promote_types(values.dtype, tensor.dtype) != tensor.dtype:
            rounded.append(name)
        with torch.no_grad():
            tensor.copy_(values)
        filled.append(name)
        used |= set(found.hf)
    report = Report(tuple(filled), tuple(fresh), tuple(rounded), tuple(sorted(names - used)))
    _judge_unused(report.unused, hf, model, place)
    _log(report, hf, model, directory)
    return report


def _values(
    reader: CheckpointReader, entry: Entry, hf: tuple[str, ...], shape: tuple, place: Place
) -> torch.Tensor:
    """Return the values of a parameter of this ``shape`` on this rank."""
    pieces = []
    for name in hf:
        full = reader.shape(name)
        if entry.split is not Split.VOCABULARY:
            pieces.append(reader.read(name, part(entry, full, place)))
            continue
        rows = shape[0] * place.shard(entry)[1]
        if rows < full[0]:
            raise ConfigError(
                f"{name} has {full[0]} rows, the model's vocabulary {rows}: build the "
                "model with the vocab_size of config.json (padded, if need be)"
            )
        wanted, *rest = part(entry, (rows, *full[1:]), place)
        start, stop = min(wanted.start, full[0]), min(wanted.stop, full[0])
        words = reader.read(name, (slice(start, stop), *rest))
        pieces.append(torch.cat([words, words.new_zeros(shape[0] - len(words), *full[1:])]))
    values = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if tuple(values.shape) != shape:
        raise ConfigError(
            f"{' + '.join(hf)} gives {tuple(values.shape)}, the model wants {shape}: the "
            "checkpoint's tensors are not of the shape that its config.json says"
        )
    return values


def _judge_unused(unused: tuple[str, ...], hf: HFModel, model, place: Place) -> None:
    """Raise if a tensor was not read that an unsplit model should have."""
    if place != Place(splits_latents=place.splits_latents, num_experts=place.num_experts):
        return  # other ranks read the rest
    if not (getattr(model, "pre_process", True) and getattr(model, "post_process", True)):
        return
    left = [
        name
        for name in unused
        # Models may leave out indexers (stage dense) and multi-token prediction.
        if not is_indexer_parameter(name) and (layer_of(name) or 0) < hf.num_layers
    ]
    if left:
        raise ConfigError(
            f"{len(left)} tensors of the checkpoint are of no use to the model, the first is "
            f"{left[0]}: it is not the model of the checkpoint"
        )


def _log(report: Report, hf: HFModel, model, directory) -> None:
    logger.info("imported %d tensors of %s", len(report.filled), directory)
    if report.fresh:
        logger.warning(
            "the checkpoint has no indexers: %d tensors keep their initial values",
            len(report.fresh),
        )
    if report.rounded:
        logger.warning("%d tensors were rounded to the model's dtype", len(report.rounded))
    indexers = sum(is_indexer_parameter(name) for name in report.unused)
    prediction = sum((layer_of(name) or 0) >= hf.num_layers for name in report.unused)
    if indexers:
        logger.warning("%d tensors of indexers were not read: the model has none", indexers)
    if prediction and not _mtp_layers(model):  # else: copies
        logger.warning("%d tensors of multi-token prediction were not read", prediction)
    for remark in hf.remarks:
        logger.warning("%s", remark)


def export_model(
    model: torch.nn.Module,
    directory: str | Path,
    config: dict,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write an unsplit Megatron GPT model as a Hugging Face checkpoint, in the model's dtypes.

    Args:
        model: ``GPTModel`` (unwrapped) with all layers and experts.
        directory: gets config.json, shards and their index; must not hold a checkpoint yet.
        config: config.json of the model, e.g. of the checkpoint that it came from. It is checked
            against the model and written without its quantisation.
        shard_bytes: largest size of a shard.

    Raises:
        ConfigError: the model is not the one that ``config`` describes, or cannot be written.
    """
    hf = parse_config(config)
    check_model(hf, model.config)
    _check_exportable(model.config, config["model_type"], hf)
    with CheckpointWriter(directory, shard_bytes) as writer:
        dtypes = set()
        for name, tensor in model_tensors(model):
            found = match(name, hf.num_layers)
            fulls = assemble(found.entry, [tensor.detach()])
            for hf_name, full in zip(found.hf, fulls, strict=True):
                if found.entry.split is Split.VOCABULARY:
                    full = full[: hf.vocab_size]
                for target in (hf_name, *_copies(hf_name, hf, model)):
                    writer.add(target, full)
            dtypes.add(tensor.dtype)
        written = {k: v for k, v in config.items() if k != "quantization_config"}
        if hf.mtp_layers:
            written["num_nextn_predict_layers"] = _mtp_layers(model)
        # The router's bias is fp32 in every model.
        narrowest = min(dtypes, key=lambda x: x.itemsize)
        written["dtype" if "dtype" in config else "torch_dtype"] = str(narrowest).split(".")[1]
        text = json.dumps(written, indent=2, sort_keys=True) + "\n"
        (Path(directory) / "config.json").write_text(text)


def _check_exportable(config, model_type: str, hf: HFModel) -> None:
    for name in ("tensor", "pipeline", "expert"):
        size = getattr(config, f"{name}_model_parallel_size")
        require(
            size == 1,
            f"{name}_model_parallel_size is {size}: a model that is split over ranks cannot be "
            "exported; save a Megatron checkpoint and use python -m megatron_dsa export-hf",
        )
    found = "indexers" if uses_indexer(config) else "no indexers"
    require(
        hf.has_indexer == uses_indexer(config),
        f"config.json: model_type = {model_type!r} does not fit a model with {found}: give the "
        "config.json of deepseek_v3 for a dense model, of deepseek_v32 or glm_moe_dsa else",
    )


def _mtp_layers(model) -> int:
    return getattr(model.config, "mtp_num_layers", None) or 0


def _copies(hf_name: str, hf: HFModel, model) -> list[str]:
    """Return under which other names a released checkpoint holds the same tensor."""
    return [
        f"model.layers.{hf.num_layers + layer}.{copy}"
        for layer in range(_mtp_layers(model))
        for copy, original in MTP_COPIES.items()
        if original == hf_name
    ]
