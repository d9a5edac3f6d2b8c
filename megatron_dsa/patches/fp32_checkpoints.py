"""Checkpoints of optimizers with 16-bit and fp32 parameters in one group.

Megatron confuses parameters when saving such a mix. megatron-core 0.20 fixes the plain optimizer,
but not the distributed one, which also saves initial fp32 parameters with
``--use-precision-aware-optimizer``.
"""

import functools
from typing import Any
from unittest import mock

import torch

from megatron_dsa.patches import replace


@functools.cache
def name_all_parameters_in_plain_checkpoints() -> None:
    """Name all parameters of a plain optimizer while saving a checkpoint.

    Megatron numbers states over all parameters but names only 16-bit ones. Here, fp32 parameters
    serve as their main copies.
    """
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    optimizer_class: Any = Float16OptimizerWithFloat16Params

    @replace(optimizer_class, "sharded_state_dict")
    def sharded_state_dict(original, self, *args, **kwargs):
        if not any(getattr(self, "fp32_from_fp32_groups", ())):
            return original(self, *args, **kwargs)
        mains = [list(group["params"]) for group in self.optimizer.param_groups]
        model_of = {
            main: model
            for models, copies in zip(
                self.float16_groups, self.fp32_from_float16_groups, strict=True
            )
            for model, main in zip(models, copies, strict=True)
        }
        models = [[model_of.get(main, main) for main in group] for group in mains]
        with mock.patch.multiple(self, float16_groups=models, fp32_from_float16_groups=mains):
            state = original(self, *args, **kwargs)
        state["fp32_from_fp16_params"] = [
            [entry for entry, main in zip(entries, group, strict=True) if main in model_of]
            for entries, group in zip(state["fp32_from_fp16_params"], mains, strict=True)
        ]
        return state


@functools.cache
def index_fp32_parameters_of_distributed_optimizer() -> None:
    """Correct indices that Megatron records before it moves fp32 parameters to the front."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer_class: Any = DistributedOptimizer
    build = optimizer_class._build_optimizer_group_ranges.__func__

    @functools.wraps(build)
    def build_optimizer_group_ranges(cls, param_groups, gbuf_ranges):
        indices, ranges = build(cls, param_groups, gbuf_ranges)
        for group, content in enumerate(ranges):
            content["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            indices |= {p: (group, index) for index, p in enumerate(content["params"])}
        return indices, ranges

    optimizer_class._build_optimizer_group_ranges = classmethod(build_optimizer_group_ranges)

    @replace(optimizer_class, "_get_main_param_and_optimizer_states")
    def get_main_param_and_optimizer_states(original, self, model_param):
        tensors = original(self, model_param)
        if model_param.dtype == torch.float32:
            # transformer-engine updates the parameter, not the copy.
            group, index = self.model_param_group_index_map[model_param]
            tensors["param"] = self.optimizer.param_groups[group]["params"][index]
        return tensors
