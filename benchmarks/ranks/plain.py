"""The peer of overlapped collectives: the same layer with a wait after each launch.

Bytes, kernels and results stay the same, so the difference is the gain of overlap.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

from benchmarks.ranks.traffic import COLLECTIVES, replaced

#: Values of a case's ``collectives``.
OVERLAPPED, PLAIN = "overlapped", "plain"


@contextlib.contextmanager
def collectives(kind: str) -> Iterator[None]:
    """Run the context with this ``kind`` of collectives; ``overlapped`` changes nothing."""
    with contextlib.ExitStack() as stack:
        if kind == PLAIN:
            for name in COLLECTIVES:
                original = getattr(torch.distributed, name)
                stack.enter_context(replaced(original, _waiting(original)))
        yield


def _waiting(original):
    """Return the collective with a wait of the current stream at its end."""

    @functools.wraps(original)
    def collective(*args, **kwargs):
        work = original(*args, **kwargs)
        if work is not None:  # asynchronous
            work.wait()
        # The caller waits again, for finished work.
        return work

    return collective
