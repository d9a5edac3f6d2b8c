"""Exceptions raised to users. Each message names the argument, the rule and the fix."""

import argparse
import re
from collections.abc import Iterable
from difflib import get_close_matches

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


def did_you_mean(given: str, known: Iterable[str], others: bool = True) -> str:
    """Return the end of a message that refuses a name: the known name that is most like it.

    Args:
        others: list all known names where none is like it.
    """
    known = list(known)
    if near := get_close_matches(given, known, n=1):
        return f"; did you mean {near[0]}?"
    return f"; available: {', '.join(known)}" if others else ""


def suggest_names(parser: argparse.ArgumentParser) -> None:
    """Let errors of a parser on unknown flags and choices name the one that is most like it."""
    refuse = parser.error

    def error(message: str):
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown is not None:
            shown = (a for a in parser._actions if a.help != argparse.SUPPRESS)
            known = [flag for action in shown for flag in action.option_strings]
            message += did_you_mean(unknown[1], known, others=False)
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]), others=False)
        refuse(message)

    parser.error = error  # type: ignore[method-assign,assignment]
