"""The peer of overlapped collectives: the same layer with each waited for where it is launched.

That is how context parallelism is written without further thought: gather the keys, then go on;
reduce and scatter their gradient, then go on. Bytes, kernels and results stay the same, so what a
step takes longer is what overlap saves.
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
    """Run what is inside with collectives of that ``kind``; ``overlapped`` changes nothing."""
    with contextlib.ExitStack() as stack:
        if kind == PLAIN:
            for name in COLLECTIVES:
                original = getattr(torch.distributed, name)
                stack.enter_context(replaced(original, _waiting(original)))
        yield


def _waiting(original):
    """Return the collective with a wait at its end: the host goes on, the current stream waits."""

    @functools.wraps(original)
    def collective(*args, **kwargs):
        work = original(*args, **kwargs)
        if work is not None:  # it was asked to be asynchronous
            work.wait()
        # The caller waits once more, for work that has ended.
        return work

    return collective
