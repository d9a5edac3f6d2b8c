"""The processes of one grid, seen from the parent: asked together, ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing import connection

from benchmarks.ranks.cases import Grid

#: Seconds that the others get once a rank has failed: they may wait for it in a collective.
GRACE = 15.0


class Ended(Exception):
    """A rank has failed or does not answer; ``gone`` says whether the processes are ended."""

    def __init__(self, reason: str, gone: bool = True):
        super().__init__(reason)
        self.reason, self.gone = reason, gone


class Pool:
    """One process per rank of a grid.

    ``target(rank, grid, store, settings, pipe)`` is what a process runs: it sends one answer when
    it is ready and one per request, ``{"status": "ok", ...}`` or another status with a reason.
    """

    def __init__(self, grid: Grid, settings: dict, timeout: float, target=None):
        if target is None:
            from benchmarks.ranks.worker import serve as target
        self.grid, self.timeout = grid, timeout
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(grid.ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, grid, store, settings, theirs)
            process = context.Process(target=target, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, case, work) -> None:
        """Send all ranks the same request: a measurement of a case."""
        for pipe in self._pipes:
            # If it has ended, :meth:`answers` will say how.
            with contextlib.suppress(OSError):
                pipe.send((case, work))

    def answers(self) -> list[dict]:
        """Return the answer of every rank.

        Raises:
            Ended: if one failed, ended, or did not answer in time. All are stopped then: ranks
                that are not at the same place can do nothing together. One rank alone goes on
                after a lack of memory.
        """
        answers: dict[int, dict] = {}
        deadline = time.monotonic() + self.timeout
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    answers[rank] = {"status": "failed", "reason": self._ending(rank)}
                if answers[rank]["status"] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        bad = [answer for answer in answers.values() if answer["status"] != "ok"]
        # The lack of memory on one rank is the cause of whatever happens to the others.
        bad.sort(key=lambda answer: answer["status"] != "out of memory")
        if bad:
            gone = self.grid.ranks > 1 or bad[0]["status"] != "out of memory"
            if gone:
                self.stop()
            raise Ended(bad[0]["reason"], gone)
        if waiting:
            self.stop()
            ranks = ", ".join(map(str, waiting))
            raise Ended(f"no answer of rank {ranks} in {self.timeout:g} s (--timeout)")
        return [answers[rank] for rank in range(self.grid.ranks)]

    def _ending(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5.0)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with {code}"
        return f"process of rank {rank} ended {how}"

    def stop(self) -> None:
        """End all processes of the grid."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()
