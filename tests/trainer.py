"""One process that runs several ``python -m module`` in turn.

Imports and the start of the GPU dominate short runs. After success, Megatron's global state is
taken down as for a restart within a process; after a failure the process ends, and the next run
gets a new one.
"""

import atexit
import gc
import multiprocessing
import os
import sys
from pathlib import Path

from tests.processes import (
    fork_managers,
    kill_with_children,
    prepare,
    run_program,
    set_environment,
)


class Trainer:
    """Runs modules in one process, started on demand."""

    def __init__(self):
        self._process = self._pipe = None
        self.starts = 0
        atexit.register(self.close)

    def run(self, module: str, flags: list[str], environment: dict, folder: Path, output: Path,
            limit: int) -> int:  # fmt: skip
        """Run ``python -m module flags``; return its exit status.

        Args:
            module: run in ``folder``.
            environment: all variables.
            output: file that everything printed is appended to.
            limit: seconds until the process is ended.

        Raises:
            TimeoutError: it was ended.
        """
        if self._process is None:
            self._start()
        self._pipe.send((module, flags, environment, str(folder), str(output)))
        if not self._pipe.poll(limit):
            self.close()
            raise TimeoutError(f"{module} {' '.join(flags)}: still running after {limit} s")
        try:
            status = self._pipe.recv()
        except EOFError:  # it died
            self._process.join()
            status = self._process.exitcode or 1
        if status:
            self.close()
        return status

    def _start(self) -> None:
        prepare()
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.starts += 1

    def close(self) -> None:
        """End the process; a later run starts another one."""
        if self._process is not None:
            kill_with_children(self._process.pid)
            self._process.join()
            self._pipe.close()
            self._process = self._pipe = None


def _serve(pipe) -> None:
    gc.freeze()  # like other forks
    fork_managers()
    while True:
        try:
            module, flags, environment, folder, output = pipe.recv()
        except EOFError:
            return
        set_environment(environment)
        os.chdir(folder)
        with open(output, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = run_program(["-m", module, *flags])
        if not status:
            _take_down()
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(status)


def _take_down() -> None:
    """Take down a training's state in Megatron, transformer-engine and this package."""
    import torch
    from megatron.core.pipeline_parallel import utils as pipeline_utils
    from megatron.training import async_utils, checkpointing, training

    from megatron_dsa.ops.dispatch import operation, reset_report

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    training.destroy_global_state()
    training.num_checkpoints_memory_reported = 0
    async_utils._async_calls_queue = None
    checkpointing._CHECKPOINT_VERSION = checkpointing._LOADED_ITERATION = None
    pipeline_utils._COMP_STREAM = pipeline_utils._COMM_STREAM = None
    reset_report()
    operation._choose.cache_clear()  # the environment may name implementations
    if "transformer_engine.pytorch" in sys.modules:
        _take_down_transformer_engine()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _take_down_transformer_engine() -> None:
    """Forget delayed scaling's factors, which are global."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
