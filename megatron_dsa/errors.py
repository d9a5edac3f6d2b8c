"""Exceptions raised to users. Each message names the argument, the rule and the fix."""

import contextlib
from collections.abc import Iterator
from os import PathLike

#: Flag that shows where an error comes from, instead of a sentence.
TRACEBACK_FLAG = "--traceback"


class DSAError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DSAError, ValueError):
    """A configuration value, a combination of values or an input shape is not supported."""


class VersionError(DSAError, ImportError):
    """A package that is needed is missing, too old or too new."""


class FallbackError(DSAError, RuntimeError):
    """``--dsa-strict`` was given and an operation has no fused implementation that can run."""


class ImplementationError(DSAError, RuntimeError):
    """An implementation was named for an operation and cannot run it here."""


def require(condition: object, message: str) -> None:
    """Raise a :class:`ConfigError` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


@contextlib.contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Name the file in errors of the file system that lack it, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
