"""Distributed Megatron checkpoints, read and written one tensor at a time.

The ``sharded_state_dict`` of a ``build.empty_model`` maps parameters to stored slices.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dsa.errors import require

type Entry = ShardedTensor | ShardedTensorFactory


def _chunk(part: ShardedTensor) -> ChunkStorageMetadata:
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(sizes))


def _parts(entry: Entry) -> list[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        return list(nested_values(entry.build()))
    return [entry]


class _IntoTensor(DefaultLoadPlanner):
    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index) -> torch.Tensor:
        return self.tensor


class StoredParameters:
    """Reader of a distributed checkpoint; ``base`` supplies missing tensors."""

    def __init__(self, directory: str | Path, base: str | Path | None = None):
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._base = None if base is None else StoredParameters(base)

    def _holder(self, key: str) -> "StoredParameters":
        stored = key in self._metadata.state_dict_metadata
        return self if stored or self._base is None else self._base

    def read(self, entry: Entry) -> torch.Tensor:
        if isinstance(entry, ShardedTensorFactory):
            return entry.merge_fn(dict_list_map_inplace(self._read, entry.build()))
        return self._read(entry)

    def dtype(self, entry: Entry) -> torch.dtype:
        return functools.reduce(
            torch.promote_types, (self._stored(x.key).properties.dtype for x in _parts(entry))
        )

    def _stored(self, key: str) -> Any:
        return self._holder(key)._metadata.state_dict_metadata[key]

    def _read(self, part: ShardedTensor) -> torch.Tensor:
        stored = self._stored(part.key)
        chunk = _chunk(part)
        tensor = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(part.key, stored, [chunk])
        covered = sum(item.lengths.numel() for item in items) == tensor.numel()
        # Stored vocabularies may have more padding.
        same = stored.size == torch.Size(part.global_shape) or part.allow_shape_mismatch
        require(
            covered and same,
            f"{part.key} is {tuple(stored.size)} in the checkpoint and {tuple(part.global_shape)} "
            "by config.json: give the config.json of the model that was trained",
        )
        self._holder(part.key)._reader.read_data(LoadPlan(items), _IntoTensor(tensor)).wait()
        return tensor.view(part.local_shape)


class _Lazily(DefaultSavePlanner):
    def __init__(self, make: Callable[[WriteItem], torch.Tensor]):
        super().__init__()
        self.resolve_data = make  # type: ignore[assignment, method-assign]


def write_checkpoint(
    directory: str | Path,
    entries: dict[str, Entry],
    values: Callable[[str], torch.Tensor],
    others: dict[str, Any],
    file_bytes: int,
) -> None:
    """Write a distributed checkpoint that Megatron can load.

    Args:
        directory: empty.
        entries: name -> entry of the sharded state dict.
        values: returns a parameter by name; the result is cast to its entry's dtype.
        others: the rest of the state dict, small.
        file_bytes: approximate size of a file, and memory used.
    """
    dist_checkpointing.save(others, str(directory))
    saved = FileSystemReader(directory).read_metadata()
    made: dict[str, list[ShardedTensor]] = {}
    plans, where = _plans(entries, file_bytes)

    def make(item: WriteItem) -> torch.Tensor:
        name, number = where[item.index]
        if name not in made:
            made.clear()
            entry = entries[name]
            made[name] = _parts(dataclasses.replace(entry, data=values(name).to(entry.data.dtype)))
        assert item.tensor_data is not None
        return made[name][number].data.reshape(item.tensor_data.chunk.sizes)

    plans, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(is_coordinator=True)
    # torch holds a file's tensors until the file is complete: write one plan per file.
    plans = writer.prepare_global_plan([SavePlan([]), *plans])[1:]
    results = [writer.write_data(plan, _Lazily(make)).wait() for plan in plans]
    metadata.state_dict_metadata |= saved.state_dict_metadata
    results.append([WriteResult(index, 0, stored) for index, stored in saved.storage_data.items()])
    writer.finish(metadata, results)


def _plans(
    entries: dict[str, Entry], file_bytes: int
) -> tuple[list[SavePlan], dict[MetadataIndex, tuple[str, int]]]:
    """Return one save plan per file, and item index -> (parameter, piece number)."""
    plans, where, size = [SavePlan([])], {}, 0
    for name, entry in entries.items():
        for number, part in enumerate(_parts(entry)):
            chunk = _chunk(part)
            data = TensorWriteData(
                chunk, TensorProperties(dtype=part.dtype), torch.Size(part.global_shape)
            )
            item = WriteItem(
                MetadataIndex(part.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data
            )
            where[item.index] = name, number
            part_bytes = chunk.sizes.numel() * part.dtype.itemsize
            if plans[-1].items and size + part_bytes > file_bytes:
                plans.append(SavePlan([]))
                size = 0
            plans[-1].items.append(item)
            size += part_bytes
    return plans, where
