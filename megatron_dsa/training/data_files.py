"""Checks of the ``.idx`` and ``.bin`` files of indexed data sets."""

import os
import struct
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

from megatron_dsa.errors import require

#: Index fields after the magic header: version, dtype code, counts of sequences and documents.
_COUNTS = struct.Struct("<QBQQ")
_BLOCK = 2**20


def check_data_set(prefix: str) -> int:
    """Return the number of tokens of the indexed data set ``<prefix>.idx``.

    Raises:
        ConfigError: a file ends early, or the index is damaged.
        OSError: a file cannot be read.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    fix = "copy it again, or write it anew with prepare-data"
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(len(_INDEX_HEADER) + _COUNTS.size)
        whole = len(head) == len(_INDEX_HEADER) + _COUNTS.size
        require(
            whole and head.startswith(_INDEX_HEADER),
            f"--data-path {prefix}: {index} is no index of a data set: {fix}",
        )
        _, code, sequences, documents = _COUNTS.unpack(head[len(_INDEX_HEADER) :])
        needed = len(head) + 12 * sequences + 8 * documents
        require(
            code in {each.value for each in DType} and size >= needed,
            f"--data-path {prefix}: {index} has {size} bytes and is damaged: by its header it must "
            f"have {needed} at least; {fix}",
        )
    offset = len(head)
    lengths = _mapped(index, np.int32, offset, sequences)
    pointers = _mapped(index, np.int64, offset + 4 * sequences, sequences)
    starts = _mapped(index, np.int64, offset + 12 * sequences, documents)
    within = True
    for first in range(0, documents, _BLOCK):
        part = starts[first : first + _BLOCK + 1]
        ascending = (part[1:] >= part[:-1]).all()
        within &= bool(ascending and ((part >= 0) & (part <= sequences)).all())
    require(
        within,
        f"--data-path {prefix}: {index} is damaged, its documents do not lie within its "
        f"{sequences} sequences: {fix}",
    )
    token_bytes = DType.size(DType.dtype_from_code(code))
    end, tokens, positive = 0, 0, True
    for first in range(0, sequences, _BLOCK):
        length, pointer = (x[first : first + _BLOCK] for x in (lengths, pointers))
        positive &= bool((length >= 0).all() and (pointer >= 0).all())
        # Unsigned integers, since damaged pointers would overflow signed ones.
        ends = pointer.astype(np.uint64) + length.astype(np.uint64) * token_bytes
        end, tokens = max(end, int(ends.max())), tokens + int(length.sum(dtype=np.int64))
    require(
        positive and end <= data.stat().st_size,
        f"--data-path {prefix}: {data} must have at least the {end} bytes that {index.name} "
        f"describes, got {data.stat().st_size}: {fix}",
    )
    return tokens


def _mapped(path: Path, dtype: type, offset: int, count: int) -> np.ndarray:
    if count == 0:  # mmap rejects empty arrays
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def check_data_sets(words: list[str] | None) -> None:
    """Check the data sets of ``--data-path``; skip weights."""
    for prefix in words or ():
        if os.path.exists(f"{prefix}.idx"):
            check_data_set(prefix)
