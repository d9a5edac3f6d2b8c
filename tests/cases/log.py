"""The indexer log in tests: reset and read."""

import torch

from megatron_dsa.metrics.log import IndexerLog


def forget_log() -> None:
    """Drop the log, so that the next model allocates its own."""
    IndexerLog._state.sums = None


def empty_log(layers: int, device: torch.device) -> None:
    """Create an empty log of some layers."""
    forget_log()
    IndexerLog.create(layers, device)


def logged() -> dict[tuple[str, int], float]:
    """Return the figures recorded since the last call, by name and layer (from 0)."""
    return {
        (name, layer): float(mean.value[layer])
        for name, mean in IndexerLog.reduce().items()
        for layer in range(len(mean.count))
        if mean.count[layer]
    }


def logged_of_first() -> dict[str, float]:
    """Return the first layer's figures recorded since the last call."""
    return {name: value for (name, layer), value in logged().items() if layer == 0}
