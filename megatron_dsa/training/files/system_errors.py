"""File-system errors and their messages."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from os import PathLike

from megatron_dsa.errors import DSAError, FileError

#: Errno -> fix.
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, and start again"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions or the path"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
        "check the path",
    ),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV), "give another path"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors gives errno in this form
_CUT_OFF = re.compile(r"\d+ requested and \d+ written")  # numpy's text gives no errno


def sentence(error: BaseException, path: str | PathLike[str] | None = None) -> str | None:
    """Describe path, reason and fix of a file-system error; return ``None`` for other errors."""
    found = _system_error(error)
    if found is None or found.errno not in _FIXES:
        return None
    if path is None:
        path = (
            "standard output or a file" if found.filename is None else os.fsdecode(found.filename)
        )
    return f"{os.fspath(path)}: {found.strerror or os.strerror(found.errno)}: {_FIXES[found.errno]}"


def _system_error(error: BaseException | None) -> OSError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if isinstance(error, OSError) and _CUT_OFF.fullmatch(str(error)):
            return OSError(errno.ENOSPC, f"only part of it was written ({error})")
        if (number := _NUMBER.search(str(error))) is not None:
            return OSError(int(number[1]), "")
        # torch collects the errors of all ranks in ``failures``.
        failures = [each[0] for each in getattr(error, "failures", {}).values()]
        error = failures[0] if failures else error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Convert file-system errors to a :class:`FileError` that names ``path``."""
    try:
        yield
    except DSAError:
        raise
    except Exception as error:
        if (message := sentence(error, path)) is None:
            raise
        raise FileError(message) from error
