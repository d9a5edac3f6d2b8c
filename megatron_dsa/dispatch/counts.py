"""How often each implementation ran, and ranges for profilers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

from megatron_dsa.dispatch.rehearsal import rehearsing

_calls: Counter[tuple[str, str]] = Counter()
_counting = True


def count(what: str, name: str) -> None:
    """Let :func:`report` tell that ``what`` was done by way of ``name``."""
    if _counting and not rehearsing():
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
    """Calls inside do not show in :func:`report` (warm-up is not the run)."""
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before


@contextlib.contextmanager
def profiler_range(name: str, nvtx: bool) -> Iterator[None]:
    """A range of that name in torch's profiler and, on a GPU, in NVTX (Nsight Systems)."""
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
