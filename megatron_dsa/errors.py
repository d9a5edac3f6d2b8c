"""Exceptions raised to users. Each message names the argument, the rule and the fix."""

#: Flag that shows where an error comes from, instead of a sentence.
TRACEBACK_FLAG = "--traceback"


class DSAError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DSAError, ValueError):
    """A configuration value, a combination of values or an input shape is not supported."""


class FileError(DSAError, OSError):
    """A file cannot be read or written, for a reason that the user can mend."""


class VersionError(DSAError, ImportError):
    """A package that is needed is missing, or its version is not supported."""


class FallbackError(DSAError, RuntimeError):
    """``--dsa-strict`` was given and an operation has no fused implementation that can run."""


class ImplementationError(DSAError, RuntimeError):
    """An implementation was named for an operation and cannot run it here."""


def require(condition: object, message: str) -> None:
    """Raise a :class:`ConfigError` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)
