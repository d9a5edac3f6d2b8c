"""Shards of a data set, which are written atomically, reused after restarts and joined."""

import contextlib
import gc
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.prepare_data.inputs import TOPICS, TOPICS_NAME, Piece, Reader, cut
from megatron_dsa.extras.prepare_data.tokens import Tokens, byte_tokens
from megatron_dsa.training.data_files import check_data_set
from megatron_dsa.training.files.system_errors import naming
from megatron_dsa.training.files.whole import WholeFiles, require_regular_file

_FORMAT = 1
_JOINED = "joined"
_SHARD_FILE = re.compile(rf"([0-9a-f]{{24}}|{_JOINED})\.(bin|idx|json)")


@dataclass(frozen=True)
class Shard:
    """Pieces that are written to one file; ``name`` is a digest."""

    name: str
    pieces: tuple[Piece, ...]
    size: int


@dataclass(frozen=True)
class Record:
    documents: int
    tokens: int
    longest: int
    skipped: dict[str, int]
    named: list[str]
    notes: list[str]


class Workspace:
    """The folder ``<prefix>.shards`` of an unfinished data set.

    Raises:
        ConfigError: ``prefix`` does not name writable files.
    """

    def __init__(self, prefix: str, tokens: Tokens, key: str, skip_broken: bool = False) -> None:
        name = os.path.basename(prefix)
        require(
            name not in ("", ".", ".."),
            f"--output {prefix} must end in the name that files begin with, got a folder: add a "
            "name",
        )
        self.prefix, self.tokens = prefix, tokens
        self.key, self.skip_broken = key, skip_broken
        self.folder = Path(f"{prefix}.shards")
        self.results = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
        for path in self.results:
            require_regular_file(path)

    def reader(self) -> Reader:
        return Reader(self.key, self.skip_broken)

    def plan(self, paths: Iterable[str] | None, most: int) -> list[Shard]:
        """Cut files, or Python's documentation by default, into shards of about ``most`` bytes."""
        pieces = [Piece(TOPICS_NAME, TOPICS, 0, 0, 0)]
        if paths is not None:
            pieces = [piece for path in paths for piece in cut(path, most, self.reader())]
        shards, some, size = [], list[Piece](), 0
        for piece in pieces:
            if some and size + piece.size > most:
                shards.append(self._shard(some, size))
                some, size = [], 0
            some.append(piece)
            size += piece.size
        return [*shards, self._shard(some, size)]

    def _shard(self, pieces: list[Piece], size: int) -> Shard:
        facts: list = [_FORMAT, self.tokens.identity, self.key, self.skip_broken]
        for piece in pieces:
            facts.append(asdict(piece) | {"path": os.path.abspath(piece.path)})
            if piece.kind != TOPICS:
                file = os.stat(piece.path)
                facts.append([file.st_size, file.st_mtime_ns])
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        return Shard(name, tuple(pieces), size)

    def __enter__(self) -> "Workspace":
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for rest in self.folder.glob("incomplete-*"):
                shutil.rmtree(rest, ignore_errors=True)
        return self

    def __exit__(self, kind, _error, _traceback) -> None:
        if kind is None:  # on errors, keep finished shards
            for file in self.folder.iterdir():
                if _SHARD_FILE.fullmatch(file.name):
                    file.unlink()
        with contextlib.suppress(OSError):  # the folder may hold other files
            self.folder.rmdir()

    def record(self, shard: Shard) -> Record | None:
        try:
            account = (self.folder / f"{shard.name}.json").read_text("utf-8")
            record = Record(**json.loads(account))
            tokens = check_data_set(str(self.folder / shard.name))
        except (OSError, ValueError, TypeError, ConfigError):
            return None
        return record if tokens == record.tokens else None

    def write(self, shard: Shard, progress: Callable[[int], None]) -> Record:
        """Tokenise a shard; ``progress`` gets the bytes since its last call."""
        reader = self.reader()
        with WholeFiles(self.folder) as files:
            builder = _Builder(files, shard.name, self.tokens.dtype)
            for piece in shard.pieces:
                before = 0
                for text, done in reader.read(piece):
                    ids = self.tokens.document(text)
                    if len(ids):
                        builder.add(ids)
                    else:
                        reader.skipped["documents without tokens"] += 1
                    done = min(done, piece.size)  # a line may end in the next piece
                    progress(done - before)
                    before = done
                progress(piece.size - before)
            builder.finish()
            record = Record(
                len(builder.lengths), sum(builder.lengths), max(builder.lengths, default=0),
                dict(reader.skipped), reader.named, reader.notes,
            )  # fmt: skip
            text = json.dumps(asdict(record))
            files.path(f"{shard.name}.json").write_text(text, encoding="utf-8")
        return record

    def join(self, shards: list[Shard]) -> None:
        parts = [self.folder / shard.name for shard in shards]
        joined = parts[0]
        if len(parts) > 1:
            joined = self.folder / _JOINED
            with WholeFiles(self.folder) as files:
                builder = IndexedDatasetBuilder(
                    str(files.path(f"{_JOINED}.bin")), dtype=self.tokens.dtype
                )
                gc.freeze()  # every add_index call runs the garbage collector
                try:
                    for part in parts:
                        builder.add_index(str(part))
                finally:
                    gc.unfreeze()
                builder.data_file.flush()
                builder.finalize(str(files.path(f"{_JOINED}.idx")))
        data, index = self.results
        for path in self.results:
            require_regular_file(path)
        with naming(data):
            index.unlink(missing_ok=True)
            os.replace(f"{joined}.bin", data)
            os.replace(f"{joined}.idx", index)


class _Builder:
    """Megatron's data-set builder, which also records document lengths."""

    def __init__(self, files: WholeFiles, name: str, dtype: type[numpy.number]) -> None:
        self._files, self._name = files, name
        self._builder = IndexedDatasetBuilder(str(files.path(f"{name}.bin")), dtype=dtype)
        self.lengths: list[int] = []

    def add(self, ids: numpy.ndarray) -> None:
        self._builder.add_document(ids, [len(ids)])  # type: ignore[arg-type]
        self.lengths.append(len(ids))

    def finish(self) -> None:
        self._builder.data_file.flush()  # flush here, so that errors name this file
        self._builder.finalize(str(self._files.path(f"{self._name}.idx")))


def write_byte_dataset(documents: Iterable[str], prefix: str | Path) -> int:
    """Write texts as :func:`.byte_tokens` to ``<prefix>.bin`` and ``.idx``; return the token count.

    Skips empty documents. Replaces existing files, the index last.

    Raises:
        ConfigError: there is no text, or a file of the result is a link or a folder.
        FileError: the files cannot be written.
    """
    folder, name = os.path.split(prefix)
    tokens = byte_tokens()
    with WholeFiles(folder) as files:
        builder = _Builder(files, name, tokens.dtype)
        for text in filter(None, documents):
            builder.add(tokens.document(text))
        require(builder.lengths, "the text is empty: give a file with at least one line")
        builder.finish()
    return sum(builder.lengths)
