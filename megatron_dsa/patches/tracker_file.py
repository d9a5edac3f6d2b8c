"""The file that names the latest checkpoint, written whole and read where it is damaged.

megatron-core 0.19 opens it for writing and then writes: a process that is killed in between leaves
it empty, and every later start ends there, with exit code 0. Checkpoints in object storage
(``--enable-msc``) are left to that.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


def keep_tracker_file_whole(read: Callable[[Path], str]) -> None:
    """Let Megatron replace tracker files in one step, and read them by ``read``."""
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
        """Open a file; a tracker file is read by ``read`` and written by :func:`replacing`."""
        from megatron.core.msc_utils import MultiStorageClientFeature

        if MultiStorageClientFeature.is_enabled() or os.path.basename(path) != self._name:
            return self._storage.open(path, mode, **kwargs)
        return replacing(path) if "w" in mode else io.StringIO(self._read(Path(path)))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file that replaces ``path`` once it is on the disk.

    A process that is killed at any time leaves the old content or the new one.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.new")
    with open(beside, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, target)
    with contextlib.suppress(OSError):  # some file systems have no folder to sync
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
