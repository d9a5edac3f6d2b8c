"""Loading of torch 2.15's checkpoint metadata and of empty stages.

megatron-core 0.19 passes saved properties to ``torch.empty``, which rejects torch 2.15's
``strides``. It also drops empty entries, so a stage without weights raises ``KeyError``.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_dsa.patches import replace


@functools.cache
def repair_reading_of_metadata() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None):
        if metadata is None:
            metadata = FileSystemReader(checkpoint_dir).read_metadata()
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            ).without_data()
            for key, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    TorchDistLoadShardedStrategy.load_tensors_metadata = load_tensors_metadata


@functools.cache
def repair_empty_stages() -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    @replace(serialization, "load")
    def load(original, sharded_state_dict, checkpoint_dir, *args, **kwargs):
        empty: dict[str, Any] = {
            name: {}
            for name, entry in sharded_state_dict.items()
            if isinstance(entry, dict) and not entry
        }
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        # Megatron may return a tuple with missing and unexpected keys.
        return empty | loaded if isinstance(loaded, dict) else (empty | loaded[0], *loaded[1:])

    dist_checkpointing.load = load
