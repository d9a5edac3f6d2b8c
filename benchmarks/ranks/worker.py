"""One of several ranks: a process that measures what it is asked for.

Ranks of a grid are asked the same and answer each for itself, over a pipe. The parent puts answers
together (:mod:`benchmarks.ranks.merge`) and ends a grid in which a rank does not answer.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback

from benchmarks.ranks.cases import DENSE, LAYERS, Case, Grid
from benchmarks.settings import Work


def serve(rank: int, grid: Grid, store: str, settings: dict, pipe, run=None) -> None:
    """Join the grid, say so, then answer until the parent hangs up.

    ``run(case, work, device, settings) -> answer`` does what is asked for (:func:`run_work`).
    """
    _end_with_parent()
    # What Megatron asks for under sequence parallelism; alike on all grids, to be compared.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        from benchmarks.process_groups import join

        device = join(rank, grid.tp, grid.cp, store)
        pipe.send({"status": "ok"})
    except Exception as error:
        traceback.print_exc()
        pipe.send(failure(error))
        return
    # What is imported stays: looking through it after every case would take longer than many do.
    gc.freeze()
    while True:
        try:
            case, work = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(run or run_work, case, work, device, settings))


def _end_with_parent() -> None:
    """End this process when its parent ends, even if it waits in a collective."""
    import multiprocessing

    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def answer(run, case: Case, work: Work, device, settings: dict) -> dict:
    """Return what came of a request, whatever happened."""
    try:
        return {"status": "ok", **run(case, work, device, settings)}
    except Exception as error:
        return failure(error)
    finally:
        _tidy()


def run_work(case: Case, work: Work, device, settings: dict) -> dict:
    """Measure this rank's part of a case."""
    from benchmarks.ranks import dense, layer

    measure = {DENSE: dense.measure, LAYERS: layer.measure_layer}[case.kind]
    return measure(case, work.way, device, settings)


def failure(error: Exception) -> dict:
    """Return what to say about an error. Libraries report a lack of memory as errors of theirs."""
    import torch

    from benchmarks.child import one_line

    lacks = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    status = "out of memory" if lacks else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {one_line(error)}"}


def _tidy() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
