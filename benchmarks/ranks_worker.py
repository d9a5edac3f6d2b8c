"""One rank of the benchmark over several GPUs: a process that measures what it is asked for.

Ranks of a grid are asked the same and answer each for itself, over a pipe. The parent puts answers
together (:mod:`benchmarks.ranks`) and ends a grid in which a rank does not answer.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback

from benchmarks.ranks_cases import Case, Grid


def serve(rank: int, grid: Grid, store: str, settings: dict, pipe, run=None) -> None:
    """Join the grid, say so, then answer until the parent hangs up.

    ``run(what, case, grid, device, settings) -> answer`` does what is asked for; by default it
    measures attention layers.
    """
    _end_with_parent()
    # What Megatron asks for under sequence parallelism; alike on all grids, to be compared.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        device = join(rank, grid, store)
        from benchmarks.measure import PACKAGES, environment

        packages = PACKAGES | {"triton": ("triton", "triton")}
        pipe.send({"status": "ok", "environment": environment(device, packages)})
    except Exception as error:
        traceback.print_exc()
        pipe.send(failure(error))
        return
    # What is imported stays: looking through it after every case would take longer than many do.
    gc.freeze()
    while True:
        try:
            what, cases = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(run or run_case, what, cases, grid, device, settings))


def _end_with_parent() -> None:
    """End this process when its parent ends, even if it waits in a collective."""
    import multiprocessing

    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def join(rank: int, grid: Grid, store: str):
    """Initialise torch's and Megatron's process groups; return this rank's device."""
    import torch

    from megatron_dsa.patches import cpu_host

    on_cpu = cpu_host.needed()
    if on_cpu:
        torch.set_num_threads(1)
        cpu_host.activate()
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl", init_method=f"file://{store}", rank=rank,
        world_size=grid.ranks,
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp, context_parallel_size=grid.cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return device


def answer(run, what: str, cases: list, grid: Grid, device, settings: dict) -> dict:
    """Return what came of a request, whatever happened."""
    try:
        result = {}
        for case in cases:
            result = run(what, case, grid, device, settings)
        return {"status": "ok", **result}
    except Exception as error:
        return failure(error)
    finally:
        _tidy()


def run_case(what: str, case: Case, grid: Grid, device, settings: dict) -> dict:
    """Measure or prepare a case of :mod:`benchmarks.ranks`."""
    from benchmarks import ranks_layer as layers
    from benchmarks import ranks_simulated as cores

    if case.part == "exchange":
        return cores.measure_exchange(case, device, settings) if what == "measure" else {}
    if case.part == "simulated":
        function = {"measure": cores.measure_core, "prepare": cores.prepare_core}[what]
        return function(case, device, settings) or {}
    function = {"measure": layers.measure_layer, "prepare": layers.prepare_layer}[what]
    return function(case, grid, device, settings) or {}


def failure(error: Exception) -> dict:
    """Return what to say about an error. Libraries report a lack of memory as errors of theirs."""
    import torch

    from benchmarks.measure import one_line

    lacks = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    status = "out of memory" if lacks else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {one_line(error)}"}


def _tidy() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
