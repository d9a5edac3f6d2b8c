"""Counts of steps and momenta of Megatron's optimizers when a checkpoint is saved and loaded.

torch counts steps per parameter, transformer-engine and Apex per parameter group. megatron-core
0.19 loses the count between optimizers of different packages:

* The distributed optimizer with torch's Adam saves its state and cannot load it: it reads the
  count before there is one, loads one tensor as the count of all parameters, each of which then
  advances it, and copies a count over it that belongs to no checkpoint.
* The other optimizers find the count only where their own package would have put it.

Rank 0 writes the unsharded part of a checkpoint, and all ranks read it. An optimizer without
parameters, there or elsewhere, as on a pipeline stage on which nothing is trained, is not expected:

* It has no count of steps. The distributed optimizer with torch's Adam reads it and cannot be
  saved; without one from rank 0, the other ranks resume at no step.
* Its list of weights in fp32 is empty, which rank 0 writes for all ranks, and which a checkpoint
  that other ranks wrote does not hold.
* Its states are also empty, and the loader leaves out empty entries, where rank 0 counts steps
  elsewhere (Muon).

A loader fills states that exist. Megatron creates them by a function that Adam has and SGD has not
(``init_state_fn=None``): it saves and ends in a ``TypeError`` at resume.
"""

import functools
from typing import Any
from unittest import mock

import torch

from megatron_dsa.patches import replace

_FP32 = "fp32_from_fp16_params"


@functools.cache
def repair_empty_optimizers() -> None:
    """Let optimizers without parameters count, save and load, for the rest of the process."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MegatronOptimizer,
    )

    _count_in_groups(MegatronOptimizer)
    _save_a_count(DistributedOptimizer)
    for optimizer_class in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        _load_the_count(optimizer_class)
    _leave_out_fp32_weights(Float16OptimizerWithFloat16Params)


def _is_empty(optimizer: Any) -> bool:
    return not any(group["params"] for group in optimizer.param_groups)


def _count_in_groups(optimizer_class: Any) -> None:
    @replace(optimizer_class, "__init__")
    def __init__(original, self, optimizer, *args, **kwargs):
        original(self, optimizer, *args, **kwargs)
        if optimizer is not None:
            count_without_parameters(optimizer)


def count_without_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer count its steps while it has no parameters; some of its kind do so already.

    transformer-engine 2.9 leaves groups without parameters uncounted, 2.20 counts them.
    """
    before: list[Any] = []

    def note(optimizer, _args, _kwargs):
        before[:] = [group.get("step", 0) + 0 for group in optimizer.param_groups]

    def count(optimizer, _args, _kwargs):
        # At every step: the distributed optimizer takes parameters away after it was built.
        if _is_empty(optimizer):
            for group, step in zip(optimizer.param_groups, before, strict=True):
                group["step"] = step + 1

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(count)


def _save_a_count(optimizer_class: Any) -> None:
    @replace(optimizer_class, "state_dict")
    def state_dict(original, self):
        if not _is_empty(self.optimizer):
            return original(self)
        inner = self.optimizer.state_dict()
        count = torch.tensor(float(inner["param_groups"][0].get("step", 0)))
        # Megatron takes the count from here, and nothing else.
        inner["state"] = {0: {"step": count}}
        with mock.patch.object(self.optimizer, "state_dict", lambda: inner):
            return original(self)


def _load_the_count(optimizer_class: Any) -> None:
    """Take the count of a checkpoint that a rank with parameters wrote."""

    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        saved = state_dict.get("optimizer", state_dict)
        if _is_empty(self.optimizer):
            state = saved.setdefault("state", {})
            if "common_step" in state:
                count = int(state["common_step"])
                for group in saved["param_groups"]:
                    group["step"] = count
        original(self, state_dict)


def _leave_out_fp32_weights(optimizer_class: Any) -> None:
    @replace(optimizer_class, "sharded_state_dict")
    def sharded_state_dict(original, self, *args, **kwargs):
        state = original(self, *args, **kwargs)
        if _is_empty(self.optimizer):
            del state[_FP32]
        return state

    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        if _is_empty(self.optimizer):
            state_dict = {**state_dict, _FP32: []}
        original(self, state_dict)


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
