"""Checks of the tracker file and checkpoint files before Megatron reads them."""

import contextlib
import functools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.training.launching import this_rank

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def saved_name(root: Path, step: int | None) -> str | None:
    """Return the name of the checkpoint to load (``release``, ``iter_0000100``), or ``None``.

    ``step`` (``--ckpt-step``) overrides the tracker file.

    Raises:
        ConfigError: the tracker file is damaged and no checkpoint is complete.
    """
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = read_tracker(tracker) if not step else tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return text
    return f"iter_{step or int(text):07d}"


def read_tracker(tracker: Path) -> str:
    """Return a tracker file's iteration or ``release``; if damaged, the last complete checkpoint's.

    Raises:
        ConfigError: the file is damaged and no checkpoint is complete.
    """
    text = tracker.read_text(errors="replace").strip()
    return text if text == RELEASE or _is_number(text) else _fall_back(tracker, text)


@functools.cache
def _fall_back(tracker: Path, text: str) -> str:
    root, content = tracker.parent, f"holds {text[:40]!r}" if text else "is empty"
    whole = _last_whole(root, _steps(root))
    if whole is not None:
        found = str(whole)
    elif _damage(root / RELEASE) is None:
        found = RELEASE
    else:
        raise ConfigError(
            f"{tracker} {content}: it must hold the number of an iteration (or {RELEASE}), and "
            f"{root} holds no whole checkpoint to take instead. Remove the file to start from "
            "scratch, or copy the checkpoints again"
        )
    if this_rank() == 0:
        print(
            f"> {tracker} {content}: it stands for the last whole checkpoint of {root}, {found} "
            "(docs/guide/resume.md)"
        )
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def check_files(directory: Path, flag: str = "--ckpt-step") -> None:
    """Check that a checkpoint exists and its files have the sizes in its metadata.

    Raises:
        ConfigError: a file is missing or cut off; the message suggests another for ``flag``.
    """
    root = directory.parent
    if not directory.is_dir():
        raise ConfigError(
            f"{root / TRACKER} or {flag} names {directory.name}, which {root} does not hold. "
            f"{_saved(root)} Name one of them with {flag}"
        )
    damage = _damage(directory)
    require(damage is None, f"{damage}. The checkpoint cannot be read: {way_on(directory, flag)}")


def _damage(directory: Path) -> str | None:
    if not any(directory.glob("*.distcp")) and not (directory / "metadata.json").exists():
        known = any(directory.glob("mp_rank_*")) or (directory / ".metadata").exists()
        return None if known else f"{directory} holds no checkpoint"
    config, metadata = directory / "metadata.json", directory / ".metadata"
    for path in (config, metadata):
        if not path.is_file():
            return f"{path} is missing"
    try:
        json.loads(config.read_text())
    except ValueError as error:
        return f"{config} is not JSON ({error})"
    try:
        lengths = _lengths(directory)
    except OSError:
        raise
    except Exception as error:  # unpickling may raise any exception
        return f"{metadata} is damaged ({str(error) or type(error).__name__})"
    for path, length in lengths.items():
        if not path.is_file():
            return f"{path} is missing"
        if (found := path.stat().st_size) < length:
            return f"{path} is cut off: {found} bytes of {length}"
    return None


def _lengths(directory: Path) -> dict[Path, int]:
    from torch.distributed.checkpoint import FileSystemReader

    lengths: dict[Path, int] = {}
    for info in (FileSystemReader(directory).read_metadata().storage_data or {}).values():
        path = directory / info.relative_path
        lengths[path] = max(lengths.get(path, 0), info.offset + info.length)
    return lengths


def way_on(directory: Path, flag: str = "--ckpt-step") -> str:
    name = directory.name.removeprefix("iter_")
    step = int(name) if _is_number(name) else None
    others = [other for other in _steps(directory.parent) if other not in (0, step)]
    other = _last_whole(directory.parent, [x for x in others if step is None or x < step])
    other = other or _last_whole(directory.parent, others)
    if other is None:
        return "there is no other beside it: copy it again"
    return f"add {flag} {other} to take iteration {other}, or copy it again (docs/guide/resume.md)"


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Raise :class:`ConfigError` for damage that file sizes do not show."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception
        reason = damage_in(error)
        if reason is None:
            raise
        message = f"checkpoint {directory} cannot be read: {reason}; {way_on(directory)}"
        raise ConfigError(message) from error


def first_failure(error: BaseException) -> BaseException:
    collects = type(error).__name__ == "CheckpointException"
    failures = getattr(error, "failures", {}) if collects else {}
    return next((each[0] for each in failures.values()), error)


def damage_in(error: BaseException) -> str | None:
    """Describe an error of damaged files; return ``None`` for other errors."""
    cause = first_failure(error)
    if not (
        isinstance(cause, EOFError | OSError | pickle.UnpicklingError)
        or (isinstance(cause, RuntimeError) and "PytorchStreamReader" in str(cause))
    ):
        return None
    silent = "a file ends too early" if isinstance(cause, EOFError) else "it cannot be read"
    reason = (str(cause).splitlines() or [""])[0] or silent
    return f"{type(cause).__name__}: {reason}"


def _last_whole(root: Path, steps: list[int]) -> int | None:
    return next((x for x in reversed(steps) if _damage(root / f"iter_{x:07d}") is None), None)


def _saved(root: Path) -> str:
    steps = _steps(root)
    return f"Saved there: {', '.join(map(str, steps[-8:])) or 'nothing'}."


def _steps(root: Path) -> list[int]:
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*"))
    return sorted(int(name) for name in names if _is_number(name))
