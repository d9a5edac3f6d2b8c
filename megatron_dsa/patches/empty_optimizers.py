"""Optimizers without parameters, as on a pipeline stage on which nothing is trained.

Rank 0 writes the unsharded part of a checkpoint, and all ranks read it. megatron-core 0.19 does not
expect that an optimizer there, or elsewhere, has nothing to step:

* It has no count of steps. The distributed optimizer with torch's Adam reads it and cannot be
  saved; without one from rank 0, the other ranks resume at no step.
* Its list of weights in fp32 is empty, which rank 0 writes for all ranks, and which a checkpoint
  that other ranks wrote does not hold.
* Its states are also empty, and the loader leaves out empty entries, where rank 0 counts steps
  elsewhere (Muon).
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
