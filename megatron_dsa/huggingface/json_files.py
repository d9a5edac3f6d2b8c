"""JSON files of a checkpoint directory, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dsa.errors import ConfigError


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ConfigError: the file cannot be read, is no JSON, gives a key twice, or holds no object.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}): correct it, or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__} where a JSON object is expected: download "
            "it again"
        )
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's dictionary; json alone would keep the last of equal keys."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"key {key!r} is given twice")
        content[key] = value
    return content
