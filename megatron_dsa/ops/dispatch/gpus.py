"""Compute capabilities and cached properties of GPUs."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
#: Support of kernels that compile for Ampere to Blackwell but ran only on Hopper.
PORTABLE: dict[str, Any] = {
    "capabilities": (AMPERE, ADA, HOPPER, BLACKWELL),
    "not_run": (AMPERE, ADA, BLACKWELL),
}


def of_device(function: Callable[[torch.device], Any], device: torch.device) -> Any:
    return function(device) if device.index is None else _cached(function, device)


@lru_cache(maxsize=64)
def _cached(function: Callable[[torch.device], Any], device: torch.device) -> Any:
    return function(device)


def processors(device: torch.device) -> int:
    return of_device(torch.cuda.get_device_properties, device).multi_processor_count
