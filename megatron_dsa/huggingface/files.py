"""Files: reading and writing the safetensors shards of a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.huggingface.quantised import (
    dequantise,
    is_fp8,
    is_packed,
    scale_names,
    unpack,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "Hugging Face checkpoints need the package safetensors, which is not installed: "
            "pip install 'megatron-dsa[hf]'"
        ) from error
    return safetensors


class CheckpointReader:
    """The tensors of a checkpoint directory by name.

    Shards are mapped into memory, not read: what :meth:`read` returns is all that is held.

    Args:
        directory: with ``model.safetensors.index.json`` and its shards, or ``model.safetensors``.
        block: rows and columns that share a scale, if weights are fp8; else ``None``.
        dtype: that quantised weights are turned into.
        rename: turns a name in the files into the name that the tensor goes by here.

    Raises:
        ConfigError: there is no checkpoint, or shards are missing.
    """

    def __init__(
        self,
        directory: str | Path,
        block: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        rename: Callable[[str], str] = str,
    ):
        self.directory = Path(directory)
        self.block, self.dtype = block, dtype
        self._open = _safetensors().safe_open
        self._shards: dict[str, object] = {}
        in_files = self._read_index()
        self._in_file = {rename(name): name for name in in_files}
        self._shard_of = {name: in_files[there] for name, there in self._in_file.items()}

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            shard_of = json.loads(index.read_text())["weight_map"]
            missing = sorted(x for x in set(shard_of.values()) if not self._path(x).is_file())
            if missing:
                raise ConfigError(
                    f"{index} names {len(missing)} shards that are not there ({missing[0]}): "
                    "download the whole checkpoint"
                )
            return shard_of
        if self._path(SINGLE).is_file():
            return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        raise ConfigError(
            f"{self.directory} holds neither {INDEX} nor {SINGLE}: name the directory of a Hugging "
            "Face checkpoint in safetensors format"
        )

    def _path(self, shard: str) -> Path:
        return self.directory / shard

    def _shard(self, shard: str):
        if shard not in self._shards:
            self._shards[shard] = self._open(str(self._path(shard)), framework="pt", device="cpu")
        return self._shards[shard]

    def names(self) -> list[str]:
        """Return the names of all tensors but scales."""
        scales = {scale for name in self._shard_of for scale in scale_names(name)}
        return [name for name in self._shard_of if name not in scales]

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def _slice(self, name: str):
        if name not in self._shard_of:
            raise ConfigError(
                f"checkpoint {self.directory} has no tensor {name}: it is incomplete, or of "
                "another shape than its config.json says"
            )
        return self._shard(self._shard_of[name]).get_slice(self._in_file[name])

    def _scale_name(self, name: str) -> str | None:
        return next((scale for scale in scale_names(name) if scale in self), None)

    def _is_packed(self, name: str, tensor) -> bool:
        return is_packed(tensor[:0].dtype) and self._scale_name(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, of a packed one after unpacking, without reading it."""
        tensor = self._slice(name)
        shape = tuple(tensor.get_shape())
        return (shape[0], 2 * shape[1]) if self._is_packed(name, tensor) else shape

    def read_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that :meth:`read` returns, without reading."""
        tensor = self._slice(name)
        dtype = tensor[:0].dtype
        return self.dtype if is_fp8(dtype) or self._is_packed(name, tensor) else dtype

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a tensor or a part of it; quantised weights are dequantised.

        Args:
            name: as :meth:`names` has it.
            part: one slice per dim with both ends given; ``None`` for all of it.
        """
        tensor = self._slice(name)
        if part is None:
            part = tuple(slice(0, extent) for extent in self.shape(name))
        if self._is_packed(name, tensor):
            return self._read_packed(name, tensor, part)
        values = tensor[part]
        if not is_fp8(values.dtype):
            return values
        if self.block is None or self._scale_name(name) is None:
            raise ConfigError(
                f"{name} is fp8 and its scales are not known: config.json must have "
                "quantization_config.weight_block_size and the checkpoint "
                f"{' or '.join(scale_names(name))}"
            )
        offset = (part[0].start, part[1].start)
        return dequantise(values, self._scales(name), self.block, self.dtype, offset)

    def _scales(self, name: str) -> torch.Tensor:
        scale = self._scale_name(name)
        return self._shard(self._shard_of[scale]).get_tensor(self._in_file[scale])

    def _read_packed(self, name: str, tensor, part: tuple[slice, slice]) -> torch.Tensor:
        """Return a part of fp4 numbers, two to a byte, with a scale for every few of a row."""
        rows, columns = part
        values = unpack(tensor[rows, slice(columns.start // 2, (columns.stop + 1) // 2)])
        odd = columns.start % 2
        values = values[:, odd : odd + columns.stop - columns.start]
        scale = self._scales(name)
        block = (1, self.shape(name)[1] // max(1, scale.shape[1]))
        return dequantise(values, scale, block, self.dtype, (rows.start, columns.start))


class CheckpointWriter:
    """Writes tensors into shards of a bounded size, and the index when all are there.

    At most one shard is held in memory. A tensor larger than a shard gets one of its own. Use as
    a context manager; the index is written last, and only if nothing failed.

    Args:
        directory: made if needed; must not hold a checkpoint yet.
        shard_bytes: largest size of a shard.

    Raises:
        ConfigError: the directory holds a checkpoint, or a shard has no size.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = 5 * 10**9):
        self.directory = Path(directory)
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes must be positive, got {shard_bytes}")
        if any((self.directory / name).exists() for name in (INDEX, SINGLE)):
            raise ConfigError(f"{self.directory} holds a checkpoint already: choose another place")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.shard_bytes = shard_bytes
        self._save = _safetensors().torch.save_file
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor under ``name``."""
        if name in self._names:
            raise ConfigError(f"tensor {name} is written twice: two parameters map to it")
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.shard_bytes:
            self._flush()
        self._names.add(name)
        # A tensor of its own: shards do not take two views of one memory.
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        path = self.directory / f"incomplete-{len(self._shards) + 1:05d}.safetensors"
        # safetensors writes a temporary file, which only its owner may read, and renames it: take
        # what a file that is opened here gets, as config.json and the index do.
        path.touch()
        mode = path.stat().st_mode
        self._save(self._held, str(path), metadata={"format": "pt"})
        path.chmod(mode)
        self._shards.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, failure, *_details) -> None:
        if failure is not None:
            return
        if self._held:
            self._flush()
        weight_map = {}
        for number, (path, names) in enumerate(self._shards, 1):
            shard = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.directory / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
