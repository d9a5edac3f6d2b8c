"""Atomic writes of the tracker file, which names the latest checkpoint.

megatron-core 0.19 truncates the file before writing, so a kill leaves it empty. Object storage
(``--enable-msc``) is not affected.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


def keep_tracker_file_whole(read: Callable[[Path], str]) -> None:
    """Replace tracker files atomically and read them with ``read``."""
    from megatron.training import checkpointing

    if not isinstance(checkpointing.maybe_msc, _Storage):
        name = checkpointing.get_checkpoint_tracker_filename("")
        checkpointing.maybe_msc = _Storage(checkpointing.maybe_msc, name, read)


class _Storage:
    def __init__(self, storage: Any, name: str, read: Callable[[Path], str]):
        self._storage, self._name, self._read = storage, name, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: str, mode: str = "r", **kwargs: Any) -> Any:
        from megatron.core.msc_utils import MultiStorageClientFeature

        if MultiStorageClientFeature.is_enabled() or os.path.basename(path) != self._name:
            return self._storage.open(path, mode, **kwargs)
        return replacing(path) if "w" in mode else io.StringIO(self._read(Path(path)))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file that replaces ``path`` once it is fully written."""
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.new")
    with open(beside, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, target)
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
