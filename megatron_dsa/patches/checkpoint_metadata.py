"""Reading the list of tensors of a distributed checkpoint under any torch.

megatron-core 0.19 passes every property that torch saved with a tensor to ``torch.empty``. torch
2.15 saves one that ``torch.empty`` does not take (``strides``). Shape and dtype say all that
Megatron keeps.
"""

import functools
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


@functools.cache
def repair_reading_of_metadata() -> None:
    """Let Megatron list the tensors of checkpoints that any version of torch wrote."""
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
