"""GPUs that dry runs plan for."""

from typing import NamedTuple

import torch

from megatron_dsa.ops.dispatch.gpus import ADA, AMPERE, BLACKWELL, HOPPER


class GPU(NamedTuple):
    name: str
    capability: tuple[int, int]
    memory_gib: float


#: torch's ``total_memory`` minus half a GiB of CUDA context.
GPUS = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 78.7),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 78.7),
    "h200": GPU("NVIDIA H200", (9, 0), 139.3),
    "b200": GPU("NVIDIA B200", (10, 0), 177.8),
    "gb200": GPU("NVIDIA GB200", (10, 0), 183.8),
}

#: Compute capability -> streaming multiprocessors of its server GPU.
_PROCESSORS = {AMPERE: 108, ADA: 142, HOPPER: 132, BLACKWELL: 148}


def planned_processors(capability: tuple[int, int]) -> int:
    return _PROCESSORS.get(capability, _PROCESSORS[HOPPER])


def gpu_here() -> str:
    """Return the key in :data:`GPUS` of this machine's GPU, else ``h200``."""
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return next((key for key, gpu in GPUS.items() if gpu.name == found), "h200")
