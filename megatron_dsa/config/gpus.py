"""Kinds of GPU that a job can be planned for."""

from typing import NamedTuple

import torch

from megatron_dsa.ops.dispatch.gpus import ADA, AMPERE, BLACKWELL, HOPPER


class GPU(NamedTuple):
    """A kind of GPU: torch's name, compute capability, GiB for an allocator."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


#: Memory as torch reports it (``total_memory``), less a CUDA context of about half a GiB.
GPUS = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 78.7),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 78.7),
    "h200": GPU("NVIDIA H200", (9, 0), 139.3),
    "b200": GPU("NVIDIA B200", (10, 0), 177.8),
    "gb200": GPU("NVIDIA GB200", (10, 0), 183.8),
}

#: Streaming multiprocessors; of a capability with several kinds of GPU, the kind in servers.
_PROCESSORS = {AMPERE: 108, ADA: 142, HOPPER: 132, BLACKWELL: 148}


def planned_processors(capability: tuple[int, int]) -> int:
    """Return how many streaming multiprocessors a GPU to plan for has."""
    return _PROCESSORS.get(capability, _PROCESSORS[HOPPER])


def gpu_here() -> str:
    """Return the key of this machine's GPU, ``h200`` if it has none or another kind."""
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return next((key for key, gpu in GPUS.items() if gpu.name == found), "h200")
