"""Process groups of torch and Megatron in a measuring process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import torch


def join(rank: int, tp: int, cp: int, store: str) -> torch.device:
    """Initialise the groups of one of ``tp * cp`` ranks; return its device.

    Args:
        rank: of this process.
        tp: tensor-parallel ranks; cp: context-parallel ranks.
        store: file for the processes' rendezvous.
    """
    device = _device(rank)
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=tp * cp,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return device


def _device(number: int = 0) -> torch.device:
    """Return GPU ``number``, or the CPU prepared for Megatron."""
    from megatron_dsa.patches import cpu_host

    if cpu_host.needed():
        torch.set_num_threads(1)
        cpu_host.activate()
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def leave() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def one_rank() -> Iterator[torch.device]:
    """Set up groups of one process for the context."""
    with tempfile.TemporaryDirectory() as folder:
        device = join(0, 1, 1, os.path.join(folder, "store"))
        try:
            yield device
        finally:
            leave()


def alone() -> torch.device:
    """Set up groups of one process; return its device."""
    if torch.distributed.is_initialized():
        return _device()
    handle, store = tempfile.mkstemp()
    os.close(handle)
    return join(0, 1, 1, store)


@contextlib.contextmanager
def one_of(ranks: int, rank: int) -> Iterator[torch.device]:
    """Set up groups of one of several tensor-parallel ranks for the context; the others are absent.

    A collective returns at once, with stale results. Existing groups are destroyed.
    """
    from megatron_dsa.extras.planner import host

    if torch.distributed.is_initialized():
        leave()
    device = _device()
    sharded = SimpleNamespace(
        world_size=ranks, tensor_model_parallel_size=ranks, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, context_parallel_size=1,
        expert_model_parallel_size=1, expert_tensor_parallel_size=None,
        num_distributed_optimizer_instances=1,
    )  # fmt: skip
    with host.ranks(sharded, rank):
        yield device
