"""GPUs by compute capability, and the kinds that a job can be planned for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
#: What a kernel declares that is compiled for all of these and was run on Hopper only.
PORTABLE: dict[str, Any] = {
    "capabilities": (AMPERE, ADA, HOPPER, BLACKWELL),
    "not_run": (AMPERE, ADA, BLACKWELL),
}


@dataclass(frozen=True)
class GPU:
    """A kind of GPU to plan for.

    Attributes:
        name: torch's name of it.
        capability: compute capability.
        memory_gib: what an allocator can have at most, GiB; the CUDA context is outside of it.
    """

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


def of_device(ask: Callable[[torch.device], Any], device: torch.device) -> Any:
    """Return ``ask(device)``, what a function of ``torch.cuda`` says of a GPU, asked once."""
    # Without an index it is the current one.
    return ask(device) if device.index is None else _asked(ask, device)


@lru_cache(maxsize=64)
def _asked(ask: Callable[[torch.device], Any], device: torch.device) -> Any:
    return ask(device)


def processors(device: torch.device) -> int:
    """Return how many streaming multiprocessors a GPU has."""
    return of_device(torch.cuda.get_device_properties, device).multi_processor_count


def gpu_here() -> str:
    """Return the key of this machine's GPU, ``h200`` if it has none or another kind."""
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return next((key for key, gpu in GPUS.items() if gpu.name == found), "h200")
