"""Adam's count of steps, which megatron-core 0.19 loses between optimizers of different packages.

torch counts steps per parameter, transformer-engine and Apex per parameter group.

* The distributed optimizer with torch's Adam saves its state and cannot load it: it asks for the
  count before there is one, loads one tensor as the count of all parameters, each of which then
  advances it, and copies a count over it that belongs to no checkpoint.
* The other optimizers find the count only where their own package would have put it.
"""

import functools
from typing import Any

import torch

from megatron_dsa.patches import replace

#: Optimizers that count the steps of every parameter.
_PER_PARAMETER = (torch.optim.Adam, torch.optim.AdamW)


@functools.cache
def repair_optimizer_steps() -> None:
    """Let all of Megatron's optimizers resume at the step at which they were saved."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    _repair_distributed(DistributedOptimizer)
    _repair_plain(FP32Optimizer, lambda state: state)
    _repair_plain(
        Float16OptimizerWithFloat16Params,
        lambda state: state.get("optimizer", state.get("optimizer_state_dict")),
    )


def _repair_distributed(optimizer_class: Any) -> None:
    @replace(optimizer_class, "state_dict")
    def state_dict(original, self):
        if not isinstance(self.optimizer, _PER_PARAMETER):
            return original(self)
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        state = original(self)
        for group in state["optimizer"]["param_groups"]:
            group["step"] = int(group["step"])  # transformer-engine takes no other
        return state

    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        original(self, state_dict)
        if isinstance(self.optimizer, _PER_PARAMETER):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @replace(optimizer_class, "_set_main_param_and_optimizer_states")
    @torch.no_grad()  # the shard of an fp32 parameter is a view of it
    def set_main_param_and_optimizer_states(original, self, model_param, tensors):
        # Not a tensor, not copied: load_state_dict has set the count.
        original(self, model_param, {**tensors, "step": None})


def _repair_plain(optimizer_class: Any, inner_state) -> None:
    """``inner_state(state_dict)`` returns the part that belongs to the inner optimizer."""

    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        saved = inner_state(state_dict)
        per_parameter = isinstance(self.optimizer, _PER_PARAMETER)
        per_group = type(self.optimizer).__name__ == "FusedAdam"  # transformer-engine's, Apex's
        of_groups = {int(group["step"]) for group in saved["param_groups"] if "step" in group}
        if per_parameter and of_groups and not _counts_parameters(saved["state"]):
            saved["state"]["common_step"] = torch.tensor(float(max(of_groups)))
        elif per_group and "common_step" in saved["state"]:
            step = int(saved["state"].pop("common_step"))
            for group in saved["param_groups"]:
                group["step"] = step
        original(self, state_dict)


def _counts_parameters(states: dict) -> bool:
    if "common_step" in states:
        return True
    return any("step" in state for state in states.values() if isinstance(state, dict))
