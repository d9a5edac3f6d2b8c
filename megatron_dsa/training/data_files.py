"""Indexed data sets on disk: sizes of the ``.idx`` and ``.bin`` files, checked before training."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

from megatron_dsa.errors import require

#: Behind the header: version, dtype code, number of sequences, number of documents.
_COUNTS = struct.Struct("<QBQQ")


def check_data_set(prefix: str) -> int:
    """Return the number of tokens of an indexed data set; see :func:`check_data_sets`.

    Args:
        prefix: path without ``.idx`` and ``.bin``.

    Raises:
        ConfigError: a file ends early, or the first is no index.
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
        lengths = np.fromfile(file, np.int32, sequences)
        pointers = np.fromfile(file, np.int64, sequences)
        starts = np.fromfile(file, np.int64, documents)
    ascending = (starts[1:] >= starts[:-1]).all()
    require(
        ascending and ((starts >= 0) & (starts <= sequences)).all(),
        f"--data-path {prefix}: {index} is damaged, its documents do not lie within its "
        f"{sequences} sequences: {fix}",
    )
    token_bytes = DType.size(DType.dtype_from_code(code))
    # Unsigned: damaged pointers do not overflow.
    ends = pointers.astype(np.uint64) + lengths.astype(np.uint64) * token_bytes
    end = int(ends.max(initial=0))
    require(
        (lengths >= 0).all() and (pointers >= 0).all() and end <= data.stat().st_size,
        f"--data-path {prefix}: {data} must have at least the {end} bytes that {index.name} "
        f"describes, got {data.stat().st_size}: {fix}",
    )
    return int(lengths.sum(dtype=np.int64))


def check_data_sets(words: list[str] | None) -> None:
    """Check the data sets of ``--data-path`` or its siblings, which may hold weights between.

    Raises:
        ConfigError, OSError: see :func:`check_data_set`.
    """
    for prefix in words or ():
        if os.path.exists(f"{prefix}.idx"):
            check_data_set(prefix)
