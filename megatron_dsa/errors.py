"""Exceptions for users; messages name argument, rule and fix."""

import argparse
import re
from collections.abc import Iterable
from difflib import get_close_matches

#: Flag that shows tracebacks instead of one-sentence errors.
TRACEBACK_FLAG = "--traceback"


class DSAError(Exception):
    """Base class of this package's errors."""


class ConfigError(DSAError, ValueError):
    """Unsupported value, combination of values or input shape."""


class FileError(DSAError, OSError):
    """Unreadable or unwritable file."""


class VersionError(DSAError, ImportError):
    """Missing package or unsupported version."""


class FallbackError(DSAError, RuntimeError):
    """Operation without a fused implementation under ``--dsa-strict``."""


class ImplementationError(DSAError, RuntimeError):
    """Named implementation that cannot run here."""


def require(condition: object, message: str) -> None:
    """Raise a :class:`ConfigError` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def did_you_mean(given: str, known: Iterable[str], others: bool = True) -> str:
    """Return a message suffix with the closest known name, or all names if ``others``."""
    known = list(known)
    if near := get_close_matches(given, known, n=1):
        return f"; did you mean {near[0]}?"
    return f"; available: {', '.join(known)}" if others else ""


def suggest_names(parser: argparse.ArgumentParser) -> None:
    """Let a parser's errors suggest the closest flag or choice."""
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
