"""Atomic result files: either all appear or none; links are not followed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from megatron_dsa.errors import DSAError, FileError, require
from megatron_dsa.training.files.system_errors import naming, sentence


def require_regular_file(path: Path) -> None:
    """Check that ``path`` is a regular file or absent."""
    require(
        not path.is_symlink() and (path.is_file() or not path.exists()),
        f"{path} is a link or no file: remove it, or choose another --output",
    )


class WholeFiles:
    """Context manager for files of one folder, written to scratch and moved when complete.

    An error removes all files and created folders; a kill leaves a folder ``incomplete-*``.

    Args:
        folder: created if needed.

    Attributes:
        scratch: folder to write to; files not returned by :meth:`path` are dropped.

    Raises:
        FileError: files cannot be written; the message names the last file.
        ConfigError: see :meth:`path`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.scratch = self.folder
        self._order: list[str] = []
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        parents = (self.folder, *self.folder.parents)
        self._made = [each for each in parents if not os.path.lexists(each)]
        try:
            with naming(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.scratch = Path(tempfile.mkdtemp(prefix="incomplete-", dir=self.folder))
        except BaseException:
            self._leave_nothing()
            raise
        return self

    def path(self, name: str) -> Path:
        """Return the scratch path of a file or folder that will be moved to ``name``.

        Files are moved in call order. The last file marks the others as complete, so an old one is
        removed first.
        """
        require_regular_file(self.folder / name)
        self._order.append(name)
        return self.scratch / name

    def finish(self) -> None:
        """Write further files after success; subclasses override this method."""

    def __exit__(self, kind, error: BaseException | None, _traceback) -> None:
        try:
            if error is None:
                self.finish()
                self._move()
        except BaseException as failure:
            error = failure
        shutil.rmtree(self.scratch, ignore_errors=True)
        if error is None:
            return
        self._leave_nothing()
        last = self.folder / self._order[-1] if self._order else self.folder
        if not isinstance(error, DSAError) and (message := sentence(error, last)) is not None:
            raise FileError(message) from error
        if kind is None:
            raise error

    def _leave_nothing(self) -> None:
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _move(self) -> None:
        if len(self._order) > 1:
            (self.folder / self._order[-1]).unlink(missing_ok=True)
        moved = []
        try:
            for name in self._order:
                os.replace(self.scratch / name, self.folder / name)
                moved.append(self.folder / name)
        except OSError:
            for path in moved:
                path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield the scratch path of a file that becomes ``path`` when complete."""
    path = Path(path)
    with WholeFiles(path.parent) as files:
        yield files.path(path.name)
