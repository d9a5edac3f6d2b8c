"""Room for the momentum of SGD when a checkpoint is loaded.

A loader fills states that exist. megatron-core 0.19 calls a function for that which Adam has and
SGD has not (``init_state_fn=None``): it saves and ends in a ``TypeError`` at resume.
"""

import functools
from typing import Any

import torch


@functools.cache
def make_room_for_momentum() -> None:
    """Let SGD resume, for the rest of the process; other optimizers see no difference."""
    from megatron.core.optimizer import SGD
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    optimizer_class: Any = MegatronOptimizer
    init = optimizer_class.__init__

    @functools.wraps(init)
    def __init__(self, optimizer, config, init_state_fn=None):
        if init_state_fn is None and isinstance(optimizer, SGD):
            init_state_fn = init_momentum
        init(self, optimizer, config, init_state_fn)

    optimizer_class.__init__ = __init__


def init_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    """Start momenta at 0, from which the first step goes as from none; without momentum nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
