"""Reader of JSON lines, parquet and plain text files, in independent pieces."""

import contextlib
import functools
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_dsa.errors import ConfigError, VersionError, require

TEXT, LINES, PARQUET, TOPICS = "text", "lines", "parquet", "topics"
_ENDINGS = {".jsonl": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: Parquet records read at a time.
_ROWS = 256
_NAMED = 3
TOPICS_NAME = "Python's language reference"


@dataclass(frozen=True)
class Piece:
    """A part of an input file.

    Attributes:
        kind: :data:`TEXT`, :data:`LINES`, :data:`PARQUET` or :data:`TOPICS` (no file).
        start, stop: bytes in which JSON lines begin, or numbers of parquet's row groups; other
            files are whole.
        size: bytes, for progress.
    """

    path: str
    kind: str
    start: int
    stop: int
    size: int


def python_documentation() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def cut(path: str, most: int, reader: "Reader") -> list[Piece]:
    """Cut a file into consecutive pieces of about ``most`` bytes.

    Compressed and text files stay whole. Reads the first JSON line, to report a wrong key early.

    Raises:
        ConfigError: see :meth:`Reader.read`.
        OSError: the file cannot be read.
    """
    file = Path(path)
    packed = file.suffix == ".gz"
    kind = _ENDINGS.get((file.with_suffix("") if packed else file).suffix, TEXT)
    size = file.stat().st_size
    if kind == PARQUET:
        require(not packed, f"--input {path}: parquet has its own compression: decompress the .gz")
        return _cut_parquet(path, most, reader.key)
    whole = Piece(path, kind, 0, size, size)
    if kind == TEXT:
        with file.open("rb"):
            return [whole]
    next(reader.read(whole), None)
    if packed:
        return [whole]
    count = max(-(-size // most), 1)
    borders = [size * i // count for i in range(count + 1)]
    return [
        Piece(path, kind, start, stop, stop - start) for start, stop in itertools.pairwise(borders)
    ]


def _cut_parquet(path: str, most: int, key: str) -> list[Piece]:
    with _parquet_file(path) as file:
        names, groups = file.schema_arrow.names, file.metadata.num_row_groups
        require(key in names, f"--input {path} {_no_key(key, names)}")
        column = file.schema_arrow.get_field_index(key)
        sizes = [
            file.metadata.row_group(i).column(column).total_uncompressed_size
            if file.metadata.num_columns == len(names)
            else file.metadata.row_group(i).total_byte_size
            for i in range(groups)
        ]
    pieces, start = [], 0
    for i in range(groups):
        if i == groups - 1 or sum(sizes[start : i + 2]) > most:
            pieces.append(Piece(path, PARQUET, start, i + 1, sum(sizes[start : i + 1])))
            start = i + 1
    return pieces or [Piece(path, PARQUET, 0, 0, 0)]


def _no_key(key: str, names: Iterable[str]) -> str:
    names = list(names)
    chat = "; conversations are trained on as they are, with --sft" if "messages" in names else ""
    found = ", ".join(names[:20]) or "none"
    return f"has no key {key!r}: give one that it has with --jsonl-key ({found}){chat}"


def _parquet_file(path: str) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise VersionError(
            f"--input {path} needs the package pyarrow: pip install 'megatron-dsa[data]'"
        ) from error
    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise ConfigError(
            f"--input {path} is no whole parquet file ({error}): copy it again"
        ) from error


@dataclass
class Reader:
    """Reader of pieces, with counts of skipped documents.

    Attributes:
        key: JSON key or parquet column of the text.
        skip_broken: skip unreadable records instead of raising.
        skipped: reason -> number of documents.
        named: names of the first broken records.
    """

    key: str
    skip_broken: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, piece: Piece) -> Iterator[tuple[str, int]]:
        """Yield the non-empty texts of a piece, with the bytes read so far.

        Raises:
            ConfigError: a record cannot be read and :attr:`skip_broken` is off, or the file is
                damaged or not UTF-8.
            OSError: the file cannot be read.
        """
        read = {TEXT: _texts, LINES: _lines, PARQUET: _rows, TOPICS: _topics}[piece.kind]
        for text, done in read(piece, self):
            if text:
                yield text, done
            elif text is not None:
                self.skipped["empty documents"] += 1

    def note(self, piece: Piece, fact: str) -> None:
        self.notes.append(f"--input {piece.path} {fact}")

    def reject(self, location: Callable[[], str], fault: str) -> None:
        if not self.skip_broken:
            raise ConfigError(
                f"--input {location()} {fault}. Correct it, or leave out broken records with "
                "--skip-broken"
            )
        self.skipped["broken records"] += 1
        if len(self.named) < _NAMED:
            self.named.append(f"{location()} {fault}")

    def text_of(self, value: Any, location: Callable[[], str]) -> str | None:
        if not isinstance(value, str):
            self.reject(location, f"holds no text at {self.key!r} but {_json_type(value)}")
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.reject(location, f"holds half of a surrogate pair at {self.key!r}")
            return None
        return value


_Texts = Iterator[tuple[str | None, int]]


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield the decompressed stream and the raw file, whose position measures progress."""
    with open(path, "rb") as raw:
        try:
            yield (gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw), raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(
                f"--input {path} cannot be decompressed ({error}): copy it again"
            ) from error


def _topics(piece: Piece, reader: Reader) -> _Texts:
    return ((text, 0) for text in python_documentation())


def _texts(piece: Piece, reader: Reader) -> _Texts:
    with _opened(piece.path) as (stream, _):
        data = stream.read()
    try:
        text = data.decode("utf-8")  # Path.read_text would translate line ends
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--input {piece.path} must be a text file in UTF-8 ({error}): convert it, or leave it "
            "out"
        ) from None
    if data.startswith(_BYTE_ORDER_MARK):
        reader.note(piece, "begins with a byte order mark, left out")
        text = text[1:]
    if "\r\n" in text:
        reader.note(piece, "has ends of lines as on Windows (CRLF), kept as they are")
    if not text:
        reader.note(piece, "is empty, left out")
        return
    yield text, piece.size


def _lines(piece: Piece, reader: Reader) -> _Texts:
    with _opened(piece.path) as (stream, raw):
        if piece.start:  # a line belongs to the piece in which it starts
            stream.seek(piece.start - 1)
            stream.readline()
        elif not stream.peek(1):
            reader.note(piece, "is empty, left out")
        while True:
            start = stream.tell()
            if stream is raw and start >= piece.stop:
                return
            if not (line := stream.readline()):
                return
            if start == 0 and line.startswith(_BYTE_ORDER_MARK):
                reader.note(piece, "begins with a byte order mark, left out")
                line = line[len(_BYTE_ORDER_MARK) :]
            yield _text_of_line(line, piece.path, start, reader), raw.tell() - piece.start


def _text_of_line(line: bytes, path: str, start: int, reader: Reader) -> str | None:
    def location() -> str:
        return f"{path}:{_line_number(path, start)}"

    if not line.strip():
        reader.skipped["blank lines"] += 1
        return None
    fault = "must hold a JSON object on every line"
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        record, fault = None, f"is not UTF-8 ({error})"
    except (json.JSONDecodeError, RecursionError) as error:
        record, fault = None, f"is no JSON ({error})"
    if isinstance(record, dict):
        if reader.key in record:
            return reader.text_of(record[reader.key], location)
        fault = _no_key(reader.key, record)
    reader.reject(location, fault)
    return None


def _line_number(path: str, start: int) -> int:
    number = 1
    with _opened(path) as (stream, _):
        while start > 0:
            block = stream.read(min(start, 2**20))
            number += block.count(b"\n")
            start -= len(block)
    return number


def _rows(piece: Piece, reader: Reader) -> _Texts:
    with _parquet_file(piece.path) as file:
        if piece.start == piece.stop:
            reader.note(piece, "is empty, left out")
            return
        rows = [file.metadata.row_group(i).num_rows for i in range(piece.stop)]
        first, total = sum(rows[: piece.start]), sum(rows[piece.start :])
        done = 0
        for batch in file.iter_batches(
            _ROWS, range(piece.start, piece.stop), [reader.key], use_threads=False
        ):
            for value in batch.column(0).to_pylist():
                done += 1
                location = functools.partial("{}: row {}".format, piece.path, first + done)
                text = reader.text_of(value, location)
                yield text, piece.size * done // total
