"""torch's and Megatron's process groups in a process that measures."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator

import torch


def join(rank: int, tp: int, cp: int, store: str) -> torch.device:
    """Initialise the groups of one of ``tp * cp`` ranks; return its device.

    Args:
        rank: of this process.
        tp: tensor-parallel ranks; cp: context-parallel ranks.
        store: a file in which the processes find each other.
    """
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
        "gloo" if on_cpu else "nccl", init_method=f"file://{store}", rank=rank, world_size=tp * cp
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return device


def leave() -> None:
    """Take down the groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def one_rank() -> Iterator[torch.device]:
    """Groups of one process, for what is inside."""
    with tempfile.TemporaryDirectory() as folder:
        device = join(0, 1, 1, os.path.join(folder, "store"))
        try:
            yield device
        finally:
            leave()


@functools.cache
def alone() -> torch.device:
    """Groups of one process, until it ends; return its device."""
    handle, store = tempfile.mkstemp()
    os.close(handle)
    return join(0, 1, 1, store)
