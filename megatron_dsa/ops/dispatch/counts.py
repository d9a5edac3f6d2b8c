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


class OperationTimes:
    """Time per operation (``--dsa-time-operations``), without the operations called inside it.

    On a GPU by events, without synchronisation. A backward that an implementation leaves to
    autograd runs outside of dispatch and is not included. ``paused``: evaluation is no part of an
    iteration.
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


@contextlib.contextmanager
def measured(operation: str, name: str, on_gpu: bool) -> Iterator[None]:
    """Count a call, and give it a range in torch's profiler and in NVTX (Nsight Systems)."""
    count(operation, name)
    label = f"megatron_dsa.{operation}.{name}"
    profiled = torch.autograd._profiler_enabled()
    if on_gpu:
        torch.cuda.nvtx.range_push(label)
    try:
        with (
            torch.profiler.record_function(label) if profiled else contextlib.nullcontext(),
            TIMES.measure(operation, on_gpu),
        ):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()
