"""Reader of TensorBoard event files."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_dsa.errors import ConfigError, VersionError, require

PATTERN = "*tfevents*"

Series = list[tuple[int, float]]


@dataclass(frozen=True)
class RunLog:
    """Content of a run's event files.

    Attributes:
        name: unique in a report.
        scalars: tag -> ``(step, value)``, ascending steps; if a resumed run repeats a step, the
            later value.
        restarts: tag -> values in writing order, for counters that restarts reset.
        texts: tag -> last text.
        starts: first step and ``--dsa-stage`` (or "") of every process whose steps were not
            overwritten, ascending; empty if no arguments were written.
        sessions: first and last write of every process, Unix seconds.
    """

    name: str
    scalars: dict[str, Series]
    restarts: dict[str, list[float]]
    texts: dict[str, str]
    starts: tuple[tuple[int, str], ...] = ()
    sessions: tuple[tuple[float, float], ...] = ()
    folder: Path | None = None

    def stages(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for step, stage in self.starts:
            if stage and (not found or found[-1][1] != stage):
                found.append((step, stage))
        return found

    def layers(self, tag: str) -> dict[int, Series]:
        """Return the series ``<tag>/layer-N`` by ``N``."""
        found = self.under(f"{tag}/layer-")
        return dict(sorted((int(layer), series) for layer, series in found.items()))

    def under(self, prefix: str) -> dict[str, Series]:
        return {
            name[len(prefix) :]: series
            for name, series in self.scalars.items()
            if name.startswith(prefix)
        }

    def counted(self, tag: str) -> float:
        total, before = 0.0, 0.0
        for value in self.restarts[tag]:
            if value < before:
                total += before
            before = value
        return total + before


def printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def missing_package(name: str) -> VersionError:
    return VersionError(f"report needs {name}: pip install 'megatron-dsa[report]'")


def find_runs(folders: list[Path]) -> dict[str, Path]:
    """Find folders with event files in and below ``folders``; return run name -> folder.

    A run's name is its path below the runs' common parent.

    Raises:
        ConfigError: a folder does not exist, there are no event files, or a path is not UTF-8.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: give what --tensorboard-dir was")
        files = sorted(folder.resolve().rglob(PATTERN))
        found.update(dict.fromkeys(file.parent for file in files))
        if not files:
            raise ConfigError(
                f"{folder} holds no event files of TensorBoard: train with --tensorboard-dir DIR, "
                "and give that folder"
            )
    for path in found:
        require(
            printable(str(path)) == str(path),
            f"{path} must be a path in UTF-8, as TensorBoard's reader wants it: rename it",
        )
    return dict(zip(_names(list(found)), found, strict=True))


def _names(paths: list[Path]) -> list[str]:
    """Return the paths without their common parts."""
    if len(paths) == 1:
        return ["/".join(paths[0].parts[-2:])]
    parts = [path.parts for path in paths]
    # A run's folder may contain another run.
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return ["/".join(part) for part in parts]


def read_run(name: str, folder: Path) -> RunLog:
    """Read the event files of a folder; they may hold no scalars yet.

    Raises:
        VersionError: TensorBoard is not installed.
    """
    try:
        from tensorboard.backend.event_processing import event_accumulator as accumulator
    except ImportError as error:
        raise missing_package("tensorboard") from error
    # By default TensorBoard subsamples long series.
    events = accumulator.EventAccumulator(
        str(folder),
        size_guidance={accumulator.SCALARS: 0, accumulator.TENSORS: 0},
        purge_orphaned_data=False,
    )
    events.Reload()
    tags = events.Tags()
    scalars, restarts = {}, {}
    times: set[float] = set()
    for tag in tags["scalars"]:
        seen = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
        times.update(event.wall_time for event in seen)
        restarts[tag] = [event.value for event in seen]
        scalars[tag] = sorted({event.step: event.value for event in seen}.items())
    written: dict[str, list[tuple[int, str]]] = {}
    begun: set[float] = set()
    for tag in tags["tensors"]:
        if not tag.endswith("/text_summary"):
            continue
        seen = sorted(events.Tensors(tag), key=lambda event: event.wall_time)
        written[tag.removesuffix("/text_summary")] = [
            (event.step, event.tensor_proto.string_val[0].decode(errors="backslashreplace"))
            for event in seen
            if event.tensor_proto.string_val
        ]
        if tag.startswith("seq_length/"):
            begun.update(event.wall_time for event in seen)
    texts = {tag: entries[-1][1] for tag, entries in written.items() if entries}
    end = max((series[-1][0] for series in scalars.values()), default=0)
    return RunLog(
        name, scalars, restarts, texts, _starts(written, end), _sessions(begun, times), folder
    )


def _sessions(begun: set[float], times: set[float]) -> tuple[tuple[float, float], ...]:
    starts = sorted(begun) or sorted(times)[:1]
    found = []
    for start, following in itertools.zip_longest(starts, starts[1:], fillvalue=math.inf):
        if later := [time for time in times if start <= time < following]:
            found.append((start, max(later)))
    return tuple(found)


def _starts(written: dict[str, list[tuple[int, str]]], end: int) -> tuple[tuple[int, str], ...]:
    stages = written.get("dsa_stage") or [(step, "") for step, _ in written.get("seq_length", ())]
    found: list[tuple[int, str]] = []
    for loaded, stage in stages:
        # A resumed process overwrites later steps.
        while found and found[-1][0] > loaded:
            found.pop()
        found.append((loaded + 1, stage))
    return tuple(start for start in found if start[0] <= end)
