"""Conversion of a Hugging Face checkpoint into a Megatron model, and back.

Each rank reads only its slices, parameter by parameter.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dsa.config.model import is_adapter_parameter, is_indexer_parameter
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.adapters import merged
from megatron_dsa.extras.huggingface.checks import (
    NonFinite,
    check_inventory,
    is_unused_bias,
    left_by_rank,
)
from megatron_dsa.extras.huggingface.config_json import (
    TEXT,
    HFModel,
    check_model,
    model_features,
    parse_config,
    read_config,
)
from megatron_dsa.extras.huggingface.features import check_features, identity, left_tensors
from megatron_dsa.extras.huggingface.files import CheckpointReader, CheckpointWriter
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, Match
from megatron_dsa.extras.huggingface.precision import ReleasedPrecision
from megatron_dsa.extras.huggingface.ranks import ParallelRank, assemble, global_name, part
from megatron_dsa.layers.v4.hash_table import check_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """Names of filled, unfilled (``fresh``) and rounded parameters, and of unused tensors."""

    filled: tuple[str, ...]
    fresh: tuple[str, ...]
    rounded: tuple[str, ...]
    unused: tuple[str, ...]


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers, without adapters."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        # transformer-engine keeps quantisation statistics as extra state.
        statistics = name.endswith("_extra_state")
        if isinstance(tensor, torch.Tensor) and not statistics and not is_adapter_parameter(name):
            yield name, tensor


class Import:
    """Reader of each parameter's tensors, on demand; see :func:`import_model`."""

    def __init__(
        self,
        model: torch.nn.Module,
        directory: str | Path,
        parallel_rank: ParallelRank = ParallelRank(),
        without: Iterable[str] = (),
    ):
        self.hf, self.parallel_rank = read_config(directory), parallel_rank
        check_model(self.hf, model.config)
        self.reader = open_checkpoint(directory, self.hf)
        self._model, self._directory = model, directory
        names = set(self.reader.names())
        outside = {name for name in names if self.hf.names.outside.match(name)}
        names -= outside
        self._outside = len(outside)
        left = left_tensors(self.hf, self.reader, model.config, set(without))
        names -= {name for group in left.values() for name in group}
        located = {name: self.hf.names.locate(name, self.hf.num_layers) for name in names}
        self._locations = {name: x for name, x in located.items() if x is not None}
        if unknown := sorted(names - self._locations.keys()):
            raise ConfigError(
                f"checkpoint {directory}: {len(unknown)} tensors have no place in Megatron's "
                f"model, the first is {unknown[0]}; give them lines in "
                "megatron_dsa/extras/huggingface/names.py"
            )
        check_inventory(directory, self._locations.values(), self.hf)
        self.nonfinite = NonFinite(
            f"checkpoint {directory}",
            "download it again, or take an earlier one; if values are too large, choose a wider "
            "dtype",
        )
        self._has_mtp = any(x.is_mtp for x in self._locations.values())
        has_indexers = any(is_indexer_parameter(name) for name in names)
        self._matches: dict[str, Match] = {}
        self._tensors = dict(model_tensors(model))
        fresh, rounded, used = [], [], set()
        for name, tensor in self._tensors.items():
            found = self.hf.names.match(global_name(name, parallel_rank), self.hf.num_layers)
            new_indexer = is_indexer_parameter(name) and not has_indexers
            # Hash-routed layers have no router bias.
            no_bias = HASH_ROUTING in left and name.endswith("router.expert_bias")
            no_bias = no_bias and found.hf[0] not in self.reader
            if new_indexer or no_bias or is_unused_bias(name, self._tensors):
                fresh.append(name)
                continue
            self._matches[name] = found
            stored = self.stored_dtype(name)
            assert stored is not None
            if torch.promote_types(stored, tensor.dtype) != tensor.dtype and not found.is_table:
                rounded.append(name)
            if found.entry.split.is_padded:
                self._check_vocabulary(found.hf[0])
            used |= set(found.hf)
        self.report = Report(
            tuple(self._matches), tuple(fresh), tuple(rounded), tuple(sorted(names - used))
        )
        self._check_unused()

    def stored_dtype(self, name: str) -> torch.dtype | None:
        if name not in self._matches:
            return None
        return functools.reduce(
            torch.promote_types, map(self.reader.read_dtype, self._matches[name].hf)
        )

    def values(self, name: str) -> torch.Tensor:
        """Read this rank's slice of a parameter in the stored dtype."""
        found, tensor = self._matches[name], self._tensors[name]
        pieces = []
        for hf_name in found.hf:
            piece = _piece(self.reader, found, hf_name, tuple(tensor.shape), self.parallel_rank)
            if found.is_table:
                words = piece[: self.hf.vocab_size]
                fields = self.hf.fields
                experts = fields["moe_router_topk"], fields["num_moe_experts"]
                check_table(words, *experts, hf_name)
            self.nonfinite.count(hf_name, piece, tensor.dtype)
            pieces.append(piece)
        values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=found.entry.join)
        if values.shape != tensor.shape:
            _refuse_shape(" + ".join(found.hf), values.shape, tensor.shape)
        return values

    def _check_vocabulary(self, hf_name: str) -> None:
        shape, words = self.reader.shape(hf_name), self.hf.vocab_size
        require(
            shape[:1] == (words,),
            f"{hf_name} is {shape}, and by config.json vocab_size = {words}: use the config.json "
            "that came with the weights",
        )

    def _check_unused(self) -> None:
        parallel_rank, model = self.parallel_rank, self._model
        unused = [self._locations[name] for name in self.report.unused]
        whole = parallel_rank == ParallelRank(
            splits_latents=parallel_rank.splits_latents, num_experts=parallel_rank.num_experts
        )
        ends = [getattr(model, f"{end}_process", True) for end in ("pre", "post")]
        if not (whole and all(ends)):
            used = [self._locations[name] for match in self._matches.values() for name in match.hf]
            unused = left_by_rank(unused, used)
        # The dense stage has no indexers; multi-token prediction is optional.
        left = [x.name for x in unused if not is_indexer_parameter(x.name) and not x.is_mtp]
        if left:
            raise ConfigError(
                f"{len(left)} tensors of the checkpoint are of no use to the model, the first is "
                f"{left[0]}: it is not the model of the checkpoint"
            )

    def log(self) -> None:
        report = self.report
        logger.info("imported %d tensors of %s", len(report.filled), self._directory)
        fresh = sum(map(is_indexer_parameter, report.fresh))
        indexers = sum(map(is_indexer_parameter, report.unused))
        # Multi-token prediction leaves its copies of shared tensors unread.
        unused = () if _mtp_layers(self._model) else report.unused
        prediction = sum(self._locations[name].is_mtp for name in unused)
        announced = 0 if self._has_mtp else self.hf.mtp_layers
        for count, message in (
            (fresh, "the checkpoint has no indexers: %d tensors keep their initial values"),
            (len(report.rounded), "%d tensors were rounded to the model's dtype"),
            (indexers, "%d tensors of indexers were not read: the model has none"),
            (prediction, "%d tensors of multi-token prediction were not read"),
            (self._outside, "%d tensors of the vision tower were not read"),
            (announced, "num_nextn_predict_layers = %d, and the checkpoint has no such layers"),
        ):
            if count:
                logger.warning(message, count)
        for remark in self.hf.remarks:
            logger.warning("%s", remark)


def open_checkpoint(directory: str | Path, hf: HFModel) -> CheckpointReader:
    """Open a checkpoint under released tensor names."""
    return CheckpointReader(directory, hf.quantisation, hf.names.rename)


def import_model(
    model: torch.nn.Module,
    directory: str | Path,
    parallel_rank: ParallelRank = ParallelRank(),
    without: Iterable[str] = (),
) -> Report:
    """Fill a Megatron GPT model, in the model's dtype, from a Hugging Face checkpoint.

    Keeps the model's indexers if the checkpoint has none.

    Args:
        model: unwrapped ``GPTModel``.
        directory: config.json and safetensors files.
        parallel_rank: this rank's position in the grid.
        without: checkpoint features to leave out.

    Raises:
        ConfigError: config.json is not understood or describes another model; or tensors are
            missing, left over, misshapen or not finite. The model may be partly filled.
    """
    source = Import(model, directory, parallel_rank, without)
    tensors = dict(model_tensors(model))
    with torch.no_grad():
        for name in source.report.filled:
            tensors[name].copy_(source.values(name))
    source.nonfinite.check()
    source.log()
    return source.report


def _piece(
    reader: CheckpointReader,
    found: Match,
    hf_name: str,
    shape: tuple[int, ...],
    parallel_rank: ParallelRank,
) -> torch.Tensor:
    full = reader.shape(hf_name)
    if len(full) != len(shape):
        _refuse_shape(hf_name, full, shape)
    if not found.entry.split.is_padded:
        return reader.read(hf_name, part(found.entry, full, parallel_rank))
    rows = shape[0] * parallel_rank.shard(found.entry)[1]
    require(
        rows >= full[0],
        f"{hf_name} has {full[0]} rows, the model's vocabulary {rows}: build the model with the "
        "vocab_size of config.json (padded, if need be)",
    )
    wanted, *rest = part(found.entry, (rows, *full[1:]), parallel_rank)
    start, stop = min(wanted.start, full[0]), min(wanted.stop, full[0])
    words = reader.read(hf_name, (slice(start, stop), *rest))
    padding = words.new_zeros(shape[0] - len(words), *full[1:])
    if found.is_table:  # padded entries need valid, distinct experts
        padding += torch.arange(full[1], dtype=words.dtype)
    return torch.cat([words, padding])


def _refuse_shape(names: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    raise ConfigError(
        f"{names} gives {tuple(found)}, the model wants {tuple(wanted)}: the checkpoint's tensors "
        "are not of the shape that its config.json says"
    )


def export_model(
    model: torch.nn.Module,
    directory: str | Path,
    config: dict,
    *,
    shard_bytes: int = 5 * 10**9,
    values: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, tensor: tensor.detach(),
    precision: ReleasedPrecision | None = None,
) -> None:
    """Write an unsplit Megatron GPT model as a Hugging Face checkpoint with adapters merged.

    Args:
        model: unwrapped ``GPTModel`` with all layers and experts.
        directory: must hold no checkpoint.
        config: the model's config.json.
        shard_bytes: maximum shard size.
        values: reads a parameter that the model does not hold.
        precision: quantisation; ``None``: the model's dtypes.

    Raises:
        ConfigError: the model differs from ``config``, has non-finite values, or cannot be written.
    """
    hf = parse_config(config)
    check_model(hf, model.config)
    _check_exportable(model, hf)
    nonfinite = NonFinite("the model", "export an earlier checkpoint")

    def read(name: str) -> torch.Tensor:
        return values(name, held[name])

    tensors = dict(model_tensors(model))
    held = dict(model.state_dict(keep_vars=True))
    with CheckpointWriter(directory, shard_bytes) as writer:
        dtypes = set()
        for name, tensor in tensors.items():
            if is_unused_bias(name, tensors):
                continue
            found = hf.names.match(name, hf.num_layers)
            fulls = assemble(found.entry, [merged(model, read, name, tensor)])
            for hf_name, full in zip(found.hf, fulls, strict=True):
                if found.entry.split.is_padded:
                    _check_rows(hf_name, len(full), hf)
                    full = full[: hf.vocab_size]
                nonfinite.count(name, full, full.dtype)
                for target in (hf_name, *_copies(hf_name, hf, model)):
                    written = precision.tensors(target, full) if precision else [(target, full)]
                    for stored, content in written:
                        writer.add(stored, content)
            if tensor.is_floating_point():
                dtypes.add(tensor.dtype)
        nonfinite.check()  # reject NaN before the index completes the checkpoint
        said = {k: v for k, v in config.items() if k != "quantization_config"}
        text = said
        if TEXT in said:
            text = said[TEXT] = {k: v for k, v in said[TEXT].items() if k != "quantization_config"}
        if "expert_dtype" in said:
            said["expert_dtype"] = None
        if hf.mtp_layers != _mtp_layers(model):
            text["num_nextn_predict_layers"] = _mtp_layers(model)
        text |= _without_features(writer, hf, model)
        said |= precision.config if precision else {}
        # The router's bias is always fp32.
        narrowest = str(min(dtypes, key=lambda x: x.itemsize)).split(".")[1]
        for part in (said, *([text] if {"dtype", "torch_dtype"} & text.keys() else [])):
            part["dtype" if "dtype" in part else "torch_dtype"] = narrowest
        path = writer.path("config.json")
        path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _check_rows(hf_name: str, rows: int, hf: HFModel) -> None:
    require(
        rows >= hf.vocab_size,
        f"{hf_name} has {rows} rows, and config.json says vocab_size = {hf.vocab_size}: give the "
        "config.json of the model that was trained",
    )


def _without_features(writer: CheckpointWriter, hf: HFModel, model) -> dict:
    """Write identity hyper-connections for plain residuals; return changes to config.json."""
    changes: dict[str, Any] = {}
    features = model_features(model.config)
    if HYPER_CONNECTIONS in hf.names.features.keys() - features:
        mtp = hf.names.mtp_prefixes(_mtp_layers(model), hf.num_layers)
        layers = [hf.names.prefix(layer, False, hf.num_layers) for layer in range(hf.num_layers)]
        streams = hf.text.get("hc_mult") or 1
        for name, tensor in identity(streams, model.config.hidden_size, layers + mtp, ["", *mtp]):
            writer.add(name, tensor)
        changes["hc_mult"] = streams
    if HASH_ROUTING in hf.names.features.keys() - features:
        if "mlp_layer_types" in hf.text:
            changes["mlp_layer_types"] = ["moe"] * hf.num_layers
        else:
            changes["num_hash_layers"] = 0
    return changes


def _check_exportable(model: torch.nn.Module, hf: HFModel) -> None:
    for name in ("tensor", "pipeline", "expert"):
        size = getattr(model.config, f"{name}_model_parallel_size")
        require(
            size == 1,
            f"{name}_model_parallel_size is {size}: a model that is split over ranks cannot be "
            "exported; save a Megatron checkpoint and use python -m megatron_dsa export-hf",
        )
    check_features(hf, model_features(model.config), "the model")
    has_indexer = any(is_indexer_parameter(name) for name, _ in model_tensors(model))
    found = "indexers" if has_indexer else "no indexers"
    require(
        hf.has_indexer == has_indexer,
        f"config.json: model_type = {hf.raw['model_type']!r} does not fit a model with {found}: "
        "give the config.json of deepseek_v3 for a dense model, else of deepseek_v32 or "
        "glm_moe_dsa; deepseek_v4 needs its indexers trained (--dsa-stage warmup)",
    )


def _mtp_layers(model) -> int:
    return getattr(model.config, "mtp_num_layers", None) or 0


def _copies(hf_name: str, hf: HFModel, model) -> list[str]:
    prefixes = hf.names.mtp_prefixes(_mtp_layers(model) * hf.names.writes_copies, hf.num_layers)
    copies = [copy for copy, original in hf.names.copies.items() if original == hf_name]
    return [prefix + copy for prefix in prefixes for copy in copies]
