"""Check the files of a distributed checkpoint before Megatron reads them.

Megatron's own reader ends on damaged files in whatever error the damage leads to, and on a tracker
file without a number with exit code 0.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from megatron_dsa.errors import ConfigError, require

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def saved_name(root: Path, step: int | None) -> str | None:
    """Return the name of the checkpoint that ``root`` says to load: ``release``, ``iter_0000100``.

    Args:
        root: what ``--save`` was.
        step: an iteration that goes before the one in the tracker file (``--ckpt-step``).

    Returns:
        ``None`` where there is no tracker file: nothing was saved.

    Raises:
        ConfigError: the tracker file holds neither ``release`` nor an iteration.
    """
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return text
    if not (text.isascii() and text.isdigit()):
        content = f"holds {text[:40]!r}" if text else "is empty"
        raise ConfigError(
            f"{tracker} {content}: it must hold the number of an iteration (or {RELEASE}). "
            f"{_saved(root)} Write the number of the last whole one into it"
        )
    return f"iter_{step or int(text):07d}"


def check_files(directory: Path, flag: str = "--ckpt-step") -> None:
    """Check that a checkpoint is there and whole, by the sizes that its metadata gives.

    Args:
        directory: such as ``checkpoints/iter_0000100``.
        flag: what chooses an iteration, for messages.

    Raises:
        ConfigError: a file is missing, or shorter than what was written; names another checkpoint.
    """
    root = directory.parent
    if not directory.is_dir():
        raise ConfigError(
            f"{root / TRACKER} or {flag} names {directory.name}, which {root} does not hold. "
            f"{_saved(root)} Name one of them with {flag}"
        )
    if not any(directory.glob("*.distcp")) and not (directory / "metadata.json").exists():
        return  # another format, which Megatron knows
    for path, length in _lengths(directory, flag).items():
        found = path.stat().st_size if path.is_file() else None
        if found is None or found < length:
            state = "is missing" if found is None else f"is cut off: {found} bytes of {length}"
            raise ConfigError(f"{path} {state}. {_other(directory, flag)}")


def _lengths(directory: Path, flag: str) -> dict[Path, int]:
    """Return the least size of every file of tensors, and read the others."""
    from torch.distributed.checkpoint import FileSystemReader

    config, metadata = directory / "metadata.json", directory / ".metadata"
    for path in (config, metadata):
        require(path.is_file(), f"{path} is missing. {_other(directory, flag)}")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise ConfigError(f"{config} is not JSON ({error}). {_other(directory, flag)}") from error
    try:
        stored = FileSystemReader(directory).read_metadata().storage_data or {}
    except (EOFError, pickle.UnpicklingError, ValueError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{metadata} is damaged ({reason}). {_other(directory, flag)}") from error
    lengths: dict[Path, int] = {}
    for info in stored.values():
        path = directory / info.relative_path
        lengths[path] = max(lengths.get(path, 0), info.offset + info.length)
    return lengths


def _other(directory: Path, flag: str) -> str:
    """What to do about a checkpoint that cannot be read."""
    others = [step for step in _steps(directory.parent) if directory.name != f"iter_{step:07d}"]
    if not others:
        return "The checkpoint cannot be read, and there is no other beside it: copy it again"
    return (
        f"The checkpoint cannot be read: copy it again, or load another one with {flag} "
        f"({', '.join(map(str, others[-8:]))}; docs/guide/resume.md)"
    )


def _saved(root: Path) -> str:
    steps = _steps(root)
    return f"Saved there: {', '.join(map(str, steps[-8:])) or 'nothing'}."


def _steps(root: Path) -> list[int]:
    """Return the iterations of which ``root`` holds directories."""
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*"))
    return sorted(int(name) for name in names if name.isdigit())
