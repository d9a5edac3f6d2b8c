"""JSON files and safetensors shards, read and written tensor by tensor."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.quantised import (
    AS_STORED,
    Format,
    Quantisation,
    dequantise,
    scale_names,
    unpack,
)
from megatron_dsa.training.files.system_errors import naming
from megatron_dsa.training.files.whole import WholeFiles, require_regular_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Rope buffers that old versions of transformers saved.
_ROPE_BUFFER = re.compile(r"\brotary_emb\.(\w*inv_freq|cos_cached|sin_cached)$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    # ValueError covers UnicodeDecodeError and JSONDecodeError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}): correct it, or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__} where a JSON object is expected: download "
            "it again"
        )
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"key {key!r} is given twice")
        content[key] = value
    return content


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


@dataclass(frozen=True)
class _Stored:
    """A stored tensor before reading; ``dtype`` is its dtype after reading."""

    tensor: Any
    form: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: str = ""
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Scales:
    """Stored scales of a quantised weight, with the block size."""

    form: Format
    values: torch.Tensor
    name: str
    block: tuple[int, int]


class CheckpointReader:
    """Reader of memory-mapped tensors; ``rename`` maps stored names to released names.

    Raises:
        ConfigError: no safetensors checkpoint, a broken index, missing or damaged shards, or scales
            that do not fit.
    """

    def __init__(
        self,
        directory: str | Path,
        quantisation: Quantisation = Quantisation(),
        rename: Callable[[str], str] = str,
    ):
        self.directory = Path(directory)
        self.quantisation = quantisation
        package = _safetensors()
        self._open, self._damaged = package.safe_open, (package.SafetensorError, OSError)
        self._shards: dict[str, Any] = {}
        # Released tensor name -> (shard, stored name).
        self._where: dict[str, tuple[str, str]] = {}
        for there, shard in self._read_index().items():
            name = rename(there)
            require(
                name not in self._where,
                f"checkpoint {directory}: {self._where.get(name, ('', ''))[1]} and {there} are two "
                f"names of one tensor, {name}: remove the one that is out of date",
            )
            self._where[name] = shard, there

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            shard_of: Any = read_json(index).get("weight_map")
            _check_weight_map(index, shard_of)
            shards = sorted(set(shard_of.values()))
            missing = [x for x in shards if not (self.directory / x).is_file()]
            if missing:
                raise ConfigError(
                    f"{index} names {len(missing)} shards that are not there ({missing[0]}): "
                    "download the whole checkpoint"
                )
            return shard_of
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        # Loading pickle files would run their code.
        pickles = sorted(x.name for x in self.directory.glob("*") if x.suffix in _PICKLES)
        found = f" but {pickles[0]}, a pickle file, which is not read" if pickles else ""
        raise ConfigError(
            f"{self.directory} holds neither {INDEX} nor {SINGLE}{found}: name the directory of a "
            "Hugging Face checkpoint in safetensors format"
        )

    def _shard(self, shard: str):
        if shard not in self._shards:
            path = self.directory / shard
            try:
                self._shards[shard] = self._open(str(path), framework="pt", device="cpu")
            except self._damaged as error:
                raise ConfigError(
                    f"{path} is no whole safetensors file ({error}): download it again"
                ) from error
        return self._shards[shard]

    def names(self) -> list[str]:
        scales = {scale for name in self._where for scale in scale_names(name)}
        return [
            name for name in self._where if name not in scales and not _ROPE_BUFFER.search(name)
        ]

    @property
    def is_quantised(self) -> bool:
        return any(scale in self for name in self._where for scale in scale_names(name))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def _slice(self, name: str):
        if name not in self._where:
            raise ConfigError(
                f"checkpoint {self.directory} has no tensor {name}: it is incomplete, or of "
                "another shape than its config.json says"
            )
        shard, there = self._where[name]
        try:
            return self._shard(shard).get_slice(there)
        except self._damaged as error:
            raise ConfigError(
                f"{self.directory / INDEX} says that {there} is in {shard}, which does not hold "
                "it: download both again"
            ) from error

    def _stored(self, name: str) -> _Stored:
        tensor = self._slice(name)
        scale = next((scale for scale in scale_names(name) if scale in self), None)
        dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
        form = self.quantisation.format(name, dtype, scale)
        if form is Format.PLAIN:
            return _Stored(tensor, form, shape, AS_STORED[dtype])
        assert scale is not None
        if form is Format.FP4 and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        scales = self._slice(scale)
        block = self.quantisation.scale_block(
            name, form, shape, tuple(scales.get_shape()), scales.get_dtype()
        )
        return _Stored(tensor, form, shape, self.quantisation.dtype, scale, block)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def read_dtype(self, name: str) -> torch.dtype:
        return self._stored(name).dtype

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read and dequantise a tensor; ``part``: one bounded slice per dim."""
        stored = self._stored(name)
        if part is None:
            part = tuple(slice(0, extent) for extent in stored.shape)
        if stored.form is Format.PLAIN:
            return stored.tensor[part] if part else self._whole(name)
        rows, columns = part
        if stored.form is Format.FP8:
            values = stored.tensor[part]
        else:
            bytes_ = slice(columns.start // 2, (columns.stop + 1) // 2)
            odd = columns.start % 2
            values = unpack(stored.tensor[rows, bytes_])
            values = values[:, odd : odd + columns.stop - columns.start]
        scale, offset = self._whole(stored.scale), (rows.start, columns.start)
        return dequantise(values, scale, stored.block, stored.dtype, offset)

    def scales(self, name: str) -> Scales | None:
        stored = self._stored(name)
        if stored.form is Format.PLAIN:
            return None
        return Scales(stored.form, self._whole(stored.scale), stored.scale, stored.block)

    def _whole(self, name: str) -> torch.Tensor:
        shard, there = self._where[name]
        return self._shard(shard).get_tensor(there)


def _check_weight_map(index: Path, shard_of: Any) -> None:
    require(
        isinstance(shard_of, dict)
        and shard_of
        and all(isinstance(x, str) for x in shard_of.values()),
        f"{index} has no weight_map from tensors to files: download it again",
    )
    for shard in sorted(set(shard_of.values())):
        path = PurePosixPath(shard)
        # Allow symlinks: Hugging Face's cache consists of them.
        require(
            not path.is_absolute() and ".." not in path.parts and "\0" not in shard,
            f"{index}: {shard!r} leads out of the directory of the checkpoint, which is not "
            "followed: put the file there and name it by its name",
        )
        require(
            path.suffix == ".safetensors",
            f"{index}: {shard!r} is no safetensors file, and no other format is read: convert the "
            "checkpoint",
        )


class CheckpointWriter(WholeFiles):
    """Context manager that writes a checkpoint in shards; a failure leaves no files.

    Raises:
        ConfigError: the directory holds a checkpoint, or ``shard_bytes`` is not positive.
        FileError: a file cannot be written.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = 5 * 10**9):
        super().__init__(directory)
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes must be positive, got {shard_bytes}")
        if any(os.path.lexists(self.folder / name) for name in (INDEX, SINGLE)):
            raise ConfigError(f"{self.folder} holds a checkpoint already: choose another place")
        require_regular_file(self.folder / "config.json")
        self.shard_bytes = shard_bytes
        _safetensors()
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise ConfigError(f"tensor {name} is written twice: two parameters map to it")
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.shard_bytes:
            self._flush()
        self._names.add(name)
        # safetensors rejects tensors that share memory.
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        path = self.scratch / f"model-{len(self._shards) + 1:05d}.safetensors"
        with naming(self.folder / path.name):
            _save(path, self._held)
        self._shards.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0

    def finish(self) -> None:
        if self._held:
            self._flush()
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            shard = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.path(shard))
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        self.path(INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # safetensors' temporary files are private: restore the usual mode.
    path.touch()
    mode = path.stat().st_mode
    _safetensors().torch.save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(mode)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _save(path, {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    package = _safetensors()
    try:
        return package.torch.load_file(str(path))
    except (package.SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is no whole safetensors file ({error}): download it again"
        ) from error
