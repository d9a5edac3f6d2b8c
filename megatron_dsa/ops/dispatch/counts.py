"""Counts, times and profiler ranges of what ran."""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

_calls: Counter[tuple[str, str]] = Counter()
_counting = True


def count(what: str, name: str) -> None:
    """Count for :func:`report` that ``name`` ran ``what``."""
    if _counting:
        _calls[what, name] += 1


def report() -> dict[str, dict[str, int]]:
    """Return how often each implementation of each operation ran in this process."""
    counts: dict[str, dict[str, int]] = {}
    for (operation, name), calls in sorted(_calls.items()):
        counts.setdefault(operation, {})[name] = calls
    return counts


def reset_report() -> None:
    """Set the counts of :func:`report` back to zero."""
    _calls.clear()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Leave calls inside out of :func:`report` (warm-up and plans)."""
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before


class profiler_range:
    """A range of that name in torch's profiler and, on a GPU, in NVTX (Nsight Systems)."""

    __slots__ = ("_name", "_nvtx", "_recorded")

    def __init__(self, name: str, nvtx: bool):
        self._name, self._nvtx = name, nvtx
        self._recorded: Any = None

    def __enter__(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)
        if torch.autograd._profiler_enabled():
            self._recorded = torch.profiler.record_function(self._name)
            self._recorded.__enter__()

    def __exit__(self, *error) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(*error)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


class OperationTimes:
    """Time per operation (``--dsa-time-operations``), without the operations called inside it.

    GPU time is measured by events, without synchronisation. A backward that an implementation
    leaves to autograd runs outside of dispatch and is not included.

    Attributes:
        on: measure.
        paused: skip calls for now (evaluation is no part of an iteration).
    """

    def __init__(self):
        self.on = self.paused = False
        self._done: list[tuple[str, str | None, Any, Any]] = []
        self._running = threading.local()  # the backward runs in threads of its own

    @contextlib.contextmanager
    def measure(self, operation: str, cuda: bool) -> Iterator[None]:
        """Measure what runs inside as ``operation``."""
        if not self.on or self.paused:
            yield
            return
        running = self._running.__dict__.setdefault("operations", [])
        around = running[-1] if running else None
        running.append(operation)
        begin = _now(cuda)
        try:
            yield
        finally:
            running.pop()
            self._done.append((operation, around, begin, _now(cuda)))

    def take(self) -> dict[str, float]:
        """Return seconds by operation since the last call; waits for the GPU."""
        done, self._done = self._done, []
        seconds: defaultdict[str, float] = defaultdict(float)
        for operation, around, begin, end in done:
            if isinstance(end, float):
                elapsed = end - begin
            else:
                end.synchronize()
                elapsed = begin.elapsed_time(end) / 1e3
            seconds[operation] += elapsed
            if around is not None:
                seconds[around] -= elapsed
        return dict(seconds)


def _now(cuda: bool):
    """Return an event on the current stream, or seconds of the host's clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


#: Times of this process.
TIMES = OperationTimes()
