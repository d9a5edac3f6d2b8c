"""The processes of one grid: all measure the same, and end together in bounded time.

They belong to the process group of the case's process, which the runner ends whatever happens.
"""

from __future__ import annotations

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

#: Importing these does not use the GPU yet: forks can.
IMPORTED = ["torch"]
#: What Megatron imports of torch, most of a small measurement's time; not tried with GPUs.
IMPORTED_ON_CPU = [*IMPORTED, "torch.distributed.tensor", "torch._inductor.compile_fx"]
#: Seconds that the others get once a rank has failed: they may wait for it in a collective.
GRACE = 15.0


class RankFailed(Exception):
    """A rank has failed, ended or does not answer; the text says which and why."""


def measured(case: Case, way: str, settings: dict, timeout: float, run=None) -> list[dict]:
    """Measure a way of a case on the ranks of its grid; return the answer of every rank.

    Args:
        case, way: what is measured.
        settings: ``repeats`` and ``budget`` (seconds).
        timeout: seconds until ranks that do not answer are ended.
        run: ``(case, way, device, settings) -> answer`` (:func:`run_rank`).

    Raises:
        RankFailed: all ranks are ended: those that are not at the same place can do nothing.
    """
    grid, context = case.grid_of(way), multiprocessing.get_context("forkserver")
    on_gpu = torch.cuda.is_available()
    context.set_forkserver_preload(IMPORTED if on_gpu else IMPORTED_ON_CPU)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(grid.ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, grid, os.path.join(folder, "store"), theirs)
                arguments += (run or run_rank, case, way, settings)
                process = context.Process(target=answer, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _answers(pipes, processes, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _answers(pipes: list, processes: list, timeout: float) -> list[dict]:
    answers: dict[int, dict] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                answers[rank] = waiting.pop(rank).recv()
            except (EOFError, OSError):
                answers[rank] = {"status": "failed", "reason": _ending(rank, processes[rank])}
            if answers[rank]["status"] != "ok":
                deadline = min(deadline, time.monotonic() + GRACE)
    bad = [found for found in answers.values() if found["status"] != "ok"]
    if bad:
        # The lack of memory on one rank is the cause of whatever happens to the others.
        raise RankFailed(min(bad, key=lambda found: found["status"] != "out of memory")["reason"])
    if waiting:
        ranks = ", ".join(map(str, waiting))
        raise RankFailed(f"no answer of rank {ranks} in {timeout:g} s (--timeout)")
    return [answers[rank] for rank in range(len(pipes))]


def _ending(rank: int, process) -> str:
    process.join(5.0)
    code = process.exitcode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with {code}"
    return f"process of rank {rank} ended {how}"


def answer(rank: int, grid: Grid, store: str, pipe, run, case: Case, way: str, settings) -> None:
    """Join the grid, measure this rank's part and send the answer, whatever happened."""
    # What Megatron asks for under sequence parallelism; alike on all grids, to be compared.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        device = join(rank, grid.tp, grid.cp, store)
        pipe.send({"status": "ok", **run(case, way, device, settings)})
    except Exception as error:
        traceback.print_exc()
        pipe.send(failure(error))


def run_rank(case: Case, way: str, device, settings: dict) -> dict:
    """Measure this rank's part of a case."""
    from benchmarks.ranks import dense, layer

    measure = {DENSE: dense.measure, LAYERS: layer.measure_layer}[case.kind]
    return measure(case, way, device, settings)


def failure(error: Exception) -> dict:
    """Return what to say about an error. Libraries report a lack of memory as errors of theirs."""
    lacks = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    status = "out of memory" if lacks else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {one_line(error)}"}
