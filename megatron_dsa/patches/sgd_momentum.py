"""Room for the momentum of SGD when a checkpoint is loaded.

A loader fills states that exist. megatron-core 0.19 creates them by a function that Adam has and
SGD has not (``init_state_fn=None``): it saves and ends in a ``TypeError`` at resume.
"""

import functools
from typing import Any

import torch

from megatron_dsa.patches import replace


@functools.cache
def make_room_for_momentum() -> None:
    """Let SGD resume, for the rest of the process; other optimizers see no difference."""
    from megatron.core.optimizer import SGD
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    @replace(MegatronOptimizer, "__init__")
    def __init__(original, self, optimizer, config, init_state_fn=None):
        if init_state_fn is None and isinstance(optimizer, SGD):
            init_state_fn = init_momentum
        original(self, optimizer, config, init_state_fn)


def init_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    """Start momenta at 0, from which the first step goes as from none; without momentum nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
