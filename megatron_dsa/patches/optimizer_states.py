"""Step counts and momenta of Megatron's optimizers in checkpoints.

torch counts steps per parameter, transformer-engine and Apex per group. megatron-core 0.19 loses
the count when the package changes: the distributed optimizer lets parameters share one count
tensor, and other optimizers look only where their package stores the count.

Optimizers without parameters fail: they have no step count, rank 0 writes their empty list of fp32
weights for all ranks, and the loader drops their empty states. SGD has no ``init_state_fn``, so
resuming raises ``TypeError``.
"""

import functools
from typing import Any
from unittest import mock

import torch

from megatron_dsa.patches import replace

_FP32 = "fp32_from_fp16_params"


@functools.cache
def repair_empty_optimizers() -> None:
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
    """Count the steps of an optimizer without parameters, as transformer-engine 2.20 does."""
    before: list[Any] = []

    def note(optimizer, _args, _kwargs):
        before[:] = [group.get("step", 0) + 0 for group in optimizer.param_groups]

    def count(optimizer, _args, _kwargs):
        # Test in each step, since the distributed optimizer removes parameters.
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
        inner["state"] = {0: {"step": count}}
        with mock.patch.object(self.optimizer, "state_dict", lambda: inner):
            return original(self)


def _load_the_count(optimizer_class: Any) -> None:
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


_PER_PARAMETER = (torch.optim.Adam, torch.optim.AdamW)


@functools.cache
def repair_optimizer_steps() -> None:
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
            group["step"] = int(group["step"])  # transformer-engine requires an integer step count
        return state

    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        original(self, state_dict)
        if isinstance(self.optimizer, _PER_PARAMETER):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @replace(optimizer_class, "_set_main_param_and_optimizer_states")
    @torch.no_grad()  # the shard of an fp32 parameter is a view
    def set_main_param_and_optimizer_states(original, self, model_param, tensors):
        # ``load_state_dict`` has already set the step count.
        original(self, model_param, {**tensors, "step": None})


def _repair_plain(optimizer_class: Any, inner_state) -> None:
    @replace(optimizer_class, "load_state_dict")
    def load_state_dict(original, self, state_dict):
        saved = inner_state(state_dict)
        per_parameter = isinstance(self.optimizer, _PER_PARAMETER)
        per_group = type(self.optimizer).__name__ == "FusedAdam"
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
    from megatron.core.optimizer import SGD
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    @replace(MegatronOptimizer, "__init__")
    def __init__(original, self, optimizer, config, init_state_fn=None):
        if init_state_fn is None and isinstance(optimizer, SGD):
            init_state_fn = init_momentum
        original(self, optimizer, config, init_state_fn)


def init_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    """Create zero momenta, which SGD treats like missing ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
