"""Time per operation, measured where dispatch runs it (``--dsa-time-operations``).

On a GPU by events on the stream, which cost no synchronisation, on the CPU by its clock. What an
implementation leaves to autograd (the backward of torch's fused attention, of rope and pooling)
runs outside of dispatch and is not in it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter

import torch


class OperationTimes:
    """Collects the time of operations; of those within others, each counts its own time only.

    Attributes:
        on: whether anything is measured.
        paused: not now (evaluation is no part of an iteration).
    """

    def __init__(self):
        self.on = self.paused = False
        self._done: list[tuple[str, str | None, object, object]] = []
        self._running = threading.local()  # the backward runs in threads of its own

    @contextlib.contextmanager
    def measure(self, operation: str, cuda: bool):
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
        seconds: Counter[str] = Counter()
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
    """A point in time: an event on the current stream, or seconds of the host's clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


#: Those of this process.
TIMES = OperationTimes()
