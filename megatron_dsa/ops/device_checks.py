"""Checks of values on a device: an error on the CPU, a device assert without waiting on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_dsa.errors import ConfigError

#: Characters that a device assert takes; a longer message raises.
LONGEST_MESSAGE = 254


def require_on_device(holds: torch.Tensor, short: str, message: Callable[[], str]) -> None:
    """Raise unless ``holds``, a bool scalar on any device, is true.

    On the CPU this raises at once. On a GPU the process ends at its next synchronisation: nothing
    waits for the device.

    Args:
        holds: the condition.
        short: what a GPU prints, cut after :data:`LONGEST_MESSAGE` characters.
        message: returns what is raised on the CPU; called only then.

    Raises:
        ConfigError: on the CPU.
    """
    if holds.device.type != "cpu":
        torch._assert_async(holds, short[:LONGEST_MESSAGE])
    elif not holds:
        raise ConfigError(message())
