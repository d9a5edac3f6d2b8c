"""Frozen base of adapters; checkpoints hold its path and a digest instead of a copy.

A base is a complete distributed checkpoint outside ``--save``, read at every start.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron_dsa.config.model import is_adapter_parameter
from megatron_dsa.errors import ConfigError
from megatron_dsa.training.checkpoint_names import same_under_another_name
from megatron_dsa.training.checkpoints import stored_entries
from megatron_dsa.training.launching import this_rank

#: Number of blocks sampled per file; a terabyte takes a second.
_BLOCKS, _BLOCK_BYTES = 16, 4096
_FILES = re.compile(r"\.metadata|metadata\.json|common\.pt|.*\.distcp")
_MOVED: dict[str, Path] = {}

#: Saved keys: ``path`` and ``content``, a digest.
type Reference = dict[str, str | None]


def describe(directory: Path) -> Reference:
    content = content_of(directory) if this_rank() == 0 else None
    return {"path": str(directory.resolve()), "content": content}


@functools.cache
def content_of(directory: Path) -> str:
    """Return a digest of a checkpoint's file names, sizes and sampled blocks."""
    digest = hashlib.sha256()
    for path in sorted(x for x in directory.iterdir() if _FILES.fullmatch(x.name)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def look_below(reference: Reference, root: str | None) -> None:
    path = Path(str(reference["path"]))
    if root is not None and not path.is_dir() and (found := Path(root) / path.name).is_dir():
        _MOVED[str(path)] = found


def find(reference: Reference, checkpoint: Path) -> Path:
    """Return the path of a checkpoint's base.

    Raises:
        ConfigError: it is missing, or (checked on rank 0) its content has changed.
    """
    path = Path(str(reference["path"]))
    found = _MOVED.get(str(path), path)
    if not found.is_dir():
        raise ConfigError(
            f"checkpoint {checkpoint} holds adapters only, and their base {path} is gone: put it "
            "back, or a link to where it lies now; a training also looks in --pretrained-checkpoint"
        )
    if this_rank() == 0 and content_of(found) != reference["content"]:
        raise ConfigError(
            f"the base {found} of the adapters in checkpoint {checkpoint} was changed since they "
            "were trained: put the base of then back, or train adapters of this one anew with "
            "--pretrained-checkpoint and an empty --load"
        )
    return found


def frozen_entries(base: Path) -> dict[str, ShardedBase]:
    return {
        key: entry
        for key, entry in stored_entries(base).items()
        if isinstance(entry, ShardedTensor)
        and not re.match(r"(chained_\d+\.)?optimizer\.", key)
        and not is_adapter_parameter(key)
    }


def saving_without(base: Path, reference: Reference) -> Callable:
    """Wrap Megatron's ``dist_checkpointing.save`` to skip tensors that a base holds.

    Tensors that the base lacks or holds in another shape are saved.
    """
    held = functools.cache(lambda: frozen_entries(base))

    def is_frozen(entry: Any) -> bool:
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            return False
        found = same_under_another_name(entry, held())
        if found is None or isinstance(found, ShardedTensorFactory):
            return found is not None
        return held()[found.key].global_shape == found.global_shape

    def save(sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if torch.distributed.is_initialized():  # all ranks must save the same digest
            content = [reference["content"]]
            torch.distributed.broadcast_object_list(content, src=0)
            reference["content"] = content[0]
        rest = {
            name: {key: x for key, x in part.items() if not is_frozen(x)}
            if name.startswith("model")
            else part
            for name, part in sharded_state_dict.items()
        }
        return serialization.save(rest, *args, **kwargs)

    return save


def load(sharded_state_dict: dict[str, Any], checkpoint: str, base: Path, *args, **kwargs) -> Any:
    own = stored_entries(checkpoint)
    rest, frozen = dict(sharded_state_dict), {}
    for name, part in sharded_state_dict.items():
        if name.startswith("model"):
            frozen[name] = {
                key: x for key, x in part.items() if isinstance(x, ShardedBase) and x.key not in own
            }
            rest[name] = {key: x for key, x in part.items() if key not in frozen[name]}
    quiet = {key: x for key, x in kwargs.items() if key != "strict"}
    weights = serialization.load(frozen, str(base), *args, **quiet)
    loaded = serialization.load(rest, checkpoint, *args, **kwargs)
    state, *keys = loaded if isinstance(loaded, tuple) else (loaded,)
    for name in frozen:
        state[name] = {**state.get(name, {}), **weights.get(name, {})}
    return (state, *keys) if keys else state
