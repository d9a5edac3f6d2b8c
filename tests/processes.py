"""Processes forked from one that has imported torch, which takes longer than most tests.

It holds torch and Megatron; this package is imported anew by every process, in its environment.
``as_users_do`` of :func:`tests.functional.launch.launch` forks nothing.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import psutil
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

REPOSITORY = Path(__file__).resolve().parents[1]

#: None initialises GPUs, which would break forks.
IMPORTED = [
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto",  # by Megatron's tokenizers
]
#: Most of a process's start. transformer-engine, imported with it, is hidden without a GPU.
MEGATRON = "tests.megatron_preload"


def python_path(*folders: Path) -> str:
    """Return ``PYTHONPATH`` with this repository and ``folders`` in front."""
    return os.pathsep.join(map(str, (REPOSITORY, *folders, os.environ.get("PYTHONPATH", ""))))


def run_ranks(function: Callable, arguments: Sequence, ranks: int) -> None:
    """Run ``function(rank, *arguments)`` in ``ranks`` processes with this environment.

    Raises:
        ProcessRaisedException, ProcessExitedException: one failed; the others are ended.
    """
    _start(_call, (dict(os.environ), function, *arguments), ranks).join()


def run_modules(
    module: str,
    flags: list[str],
    environments: list[dict],
    folder: Path,
    output: Path,
    limit: int,
    kill_at: str | None = None,
) -> int:
    """Run ``python -m module flags`` in a process for each of ``environments``.

    Args:
        module: run in ``folder``.
        output: file that everything printed is appended to.
        limit: seconds until all are ended.
        kill_at: kill all processes once this text is printed.

    Returns:
        Exit status of the first failure, after which the others are ended; else 0.
    """
    arguments = (module, flags, environments, str(folder), str(output), kill_at is None)
    processes = _start(_run_module, arguments, len(environments))
    end = time.monotonic() + limit
    try:
        while not processes.join(timeout=0.01 if kill_at else max(end - time.monotonic(), 0)):
            late = time.monotonic() >= end
            if late or (kill_at and kill_at in output.read_text(errors="replace")):
                for process in processes.processes:
                    kill_with_children(process.pid)
            if late:
                raise TimeoutError(f"{module} {' '.join(flags)}: still running after {limit} s")
    except (ProcessExitedException, ProcessRaisedException) as error:
        return getattr(error, "exit_code", 1)
    return 0


@dataclass(frozen=True)
class Lost:
    """A rank that is lost in a run without a launcher.

    Attributes:
        rank: its number.
        at: text in the log before it is lost.
        signal: killed, or stopped.
        limit: seconds for the others to end.
    """

    rank: int
    at: str
    signal: int
    limit: float


def run_without_a_rank(
    module: str, flags: list[str], environments: list[dict], folder: Path, output: Path, lost: Lost
) -> list[int | None]:
    """Run :func:`run_modules`, lose a rank and wait for the others.

    Returns:
        Exit statuses, ``None`` of a rank that did not end by itself.

    Raises:
        TimeoutError: the run ended before the rank was lost.
    """
    arguments = (module, flags, environments, str(folder), str(output), True)
    processes = _start(_run_module, arguments, len(environments)).processes
    started: list[psutil.Process] = []
    try:
        end = time.monotonic() + 600
        while lost.at not in output.read_text(errors="replace"):
            if time.monotonic() > end or any(p.exitcode for p in processes):
                raise TimeoutError(f"no {lost.at!r} in the log: {output.read_text()[-3000:]}")
            time.sleep(0.01)
        # A rank's children would outlive it, and keep pipes open.
        started += [child for p in processes for child in children_of(p.pid)]
        os.kill(processes[lost.rank].pid, lost.signal)
        end = time.monotonic() + lost.limit
        others = [p for rank, p in enumerate(processes) if rank != lost.rank]
        for process in others:
            process.join(max(end - time.monotonic(), 0.0))
        return [process.exitcode for process in others]
    finally:
        for process in processes:
            kill_with_children(process.pid)
            process.join()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def children_of(pid: int) -> list[psutil.Process]:
    """Return a process's descendants; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_with_children(pid: int) -> None:
    """Kill a process with its checkpoint writers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [psutil.Process(pid), *children_of(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _start(function, arguments, ranks):
    prepare()
    return torch.multiprocessing.start_processes(
        function, arguments, nprocs=ranks, join=False, start_method="forkserver"
    )


@functools.cache
def prepare() -> None:
    """Start the process that all others are forked from."""
    variables = {
        # Read when torch is imported.
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        # Failed imports are skipped silently.
        "PYTHONPATH": python_path(),
    }
    with mock.patch.dict(os.environ, variables):
        if not torch.cuda.is_available():
            # sys.modules may hide it already.
            engine = PathFinder.find_spec("transformer_engine")
            multiprocessing.set_forkserver_preload(IMPORTED if engine else [*IMPORTED, MEGATRON])
        forkserver.ensure_running()


def begin(environment: dict) -> None:
    """Start a forked process with this environment."""
    # Garbage collection takes 0.25 s after the fork, and copies pages.
    gc.freeze()
    set_environment(environment)


def set_environment(environment: dict) -> None:
    """Replace all environment variables."""
    os.environ.clear()
    os.environ.update(environment)


def _call(rank, environment, function, *arguments):
    begin(environment)
    function(rank, *arguments)


def fork_managers() -> None:
    """Fork the process that collects a save's results: Megatron's new one would import torch."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.context.SpawnContext.Manager = lambda self: fork.Manager()


def run_program(arguments: list[str]) -> int:
    """Run ``python arguments`` in this process; return its exit status.

    ``arguments``: ``-m`` and a module, or a file; and theirs. ``sys.path`` stays as it is.
    """
    # The fork server's default would pass workers to it.
    multiprocessing.set_start_method("fork", force=True)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> None:
    """End a multiprocessing child like any other process."""
    # multiprocessing skips these two.
    atexit._run_exitfuncs()  # prints their errors
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def _run_module(rank, module, flags, environments, folder, output, saves_fast):
    begin(environments[rank])
    if saves_fast:  # else there is time to kill it in a save
        fork_managers()
    os.chdir(folder)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    leave(run_program(["-m", module, *flags]))
