"""Distributed checkpoints of any layout, read as plain tensors."""

from pathlib import Path

import torch


def latest(directory) -> str:
    """Return the newest checkpoint folder below ``directory``."""
    return str(sorted(Path(directory).glob("iter_*"))[-1])


def read(directory) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint, unsharded, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(latest(directory))
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def gradients_of_first_step(directory) -> dict[str, torch.Tensor]:
    """Return every parameter's gradient in the first Adam step, from its first moment.

    After one step ``exp_avg == (1 - beta1) * gradient``, saved unsharded, so different layouts
    compare directly.
    """
    prefix = "optimizer.state.exp_avg."
    return {
        key.removeprefix(prefix): value / 0.1
        for key, value in read(directory).items()
        if key.startswith(prefix)
    }
