"""Processes of grids: all ranks measure the same, and end together in bounded time.

They belong to the process group of the case's process, which the runner always ends.
"""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing import connection

import torch

from benchmarks.child import one_line
from benchmarks.process_groups import join
from benchmarks.ranks.cases import DENSE, LAYERS, Case, Grid

#: Importing these does not initialise the GPU, so forks can use it.
IMPORTED = ["torch"]
#: Megatron's torch imports, most of a small measurement's time; not tried with GPUs.
IMPORTED_ON_CPU = [*IMPORTED, "torch.distributed.tensor", "torch._inductor.compile_fx"]
#: Seconds for the others after a rank has failed: they may wait for it in a collective.
GRACE = 15.0


class RankFailed(Exception):
    """A rank has failed, ended or hangs; the text names it and the reason."""


class Ranks:
    """Processes of one grid, which measure one way after another.

    Args:
        grid: tensor- and context-parallel ranks.
        run: ``(case, way, device, settings) -> answer`` (:func:`run_rank`).
    """

    def __init__(self, grid: Grid, run=None):
        context, on_gpu = multiprocessing.get_context("forkserver"), torch.cuda.is_available()
        context.set_forkserver_preload(IMPORTED if on_gpu else IMPORTED_ON_CPU)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(grid.ranks):
            ours, theirs = context.Pipe()
            arguments = rank, grid, os.path.join(self._folder.name, "store"), theirs, run
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def measured(self, case: Case, way: str, settings: dict, timeout: float) -> list[dict]:
        """Measure a way of a case; return the answer of every rank.

        Args:
            settings: ``repeats`` and ``budget`` (seconds).
            timeout: seconds until a hanging rank has failed.

        Raises:
            RankFailed: ranks out of step cannot continue: end them.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended, as its answer will say
                pipe.send((case, way, settings))
        answers: dict[int, dict] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    reason = _ending(rank, self._processes[rank])
                    answers[rank] = {"status": "failed", "reason": reason}
                if answers[rank]["status"] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        bad = [found for found in answers.values() if found["status"] != "ok"]
        if bad:
            # Out of memory on one rank causes all other failures.
            raise RankFailed(
                min(bad, key=lambda found: found["status"] != "out of memory")["reason"]
            )
        if waiting:
            ranks = ", ".join(map(str, waiting))
            raise RankFailed(f"no answer of rank {ranks} in {timeout:g} s (--timeout)")
        return [answers[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


class Grids:
    """The ranks of a case's grids, started on demand and kept.

    Starting them takes longer than most measurements.
    """

    def __init__(self, run=None):
        self._run = run
        self._started: dict[Grid, Ranks] = {}

    def measured(self, case: Case, way: str, settings: dict, timeout: float) -> list[dict]:
        """Call :meth:`Ranks.measured` of the way's ranks; end ranks that fail."""
        grid = case.grid_of(way)
        if grid not in self._started:
            self._started[grid] = Ranks(grid, self._run)
        try:
            return self._started[grid].measured(case, way, settings, timeout)
        except RankFailed:
            self._started.pop(grid).end()
            raise

    def end(self) -> None:
        while self._started:
            self._started.popitem()[1].end()


def _ending(rank: int, process) -> str:
    process.join(5.0)
    code = process.exitcode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with {code}"
    return f"process of rank {rank} ended {how}"


def serve(rank: int, grid: Grid, store: str, pipe, run) -> None:
    """Join the grid, then measure this rank's part of all requests, until one fails."""
    # Megatron requires it under sequence parallelism; equal on all grids.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        device = join(rank, grid.tp, grid.cp, store)
        while True:
            case, way, settings = pipe.recv()
            pipe.send({"status": "ok", **(run or run_rank)(case, way, device, settings)})
            # The next way starts with the memory of a new process.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except EOFError:  # the process of the case has ended
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(failure(error))


def run_rank(case: Case, way: str, device, settings: dict) -> dict:
    from benchmarks.ranks import dense, layer

    measure = {DENSE: dense.measure, LAYERS: layer.measure_layer}[case.kind]
    return measure(case, way, device, settings)


def failure(error: Exception) -> dict:
    """Describe an error; libraries raise their own out-of-memory errors."""
    lacks = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    status = "out of memory" if lacks else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {one_line(error)}"}
