"""Patch of megatron-core 0.19's Muon for marked parameters
(:mod:`megatron_dsa.layers.weight_blocks`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import emerging_optimizers, layer_wise_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.tensor_parallel import layers

from megatron_dsa.extras.muon.optimizer import (
    BlockAdaptiveMuon,
    BlockMuon,
    is_left_to_adamw,
)
from megatron_dsa.layers.weight_blocks import ROW_BLOCKS

MUON = {"muon": BlockMuon, "adaptive_muon": BlockAdaptiveMuon}


@functools.cache
def read_marks_of_muon() -> None:
    # Megatron copies registered attributes to fp32 main parameters.
    layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS[ROW_BLOCKS] = None
    left = ParamKey(predicate=ParamPredicate(name="left_to_adamw", fn=is_left_to_adamw))
    for name, optimizer_class in MUON.items():
        entry = emerging_optimizers._EMERGING_OPTIMIZERS[name]
        emerging_optimizers._EMERGING_OPTIMIZERS[name] = dataclasses.replace(
            entry,
            optimizer_cls=optimizer_class,
            default_param_overrides={left: {"optimizer": "adam"}},
        )
    # Megatron also calls this function when it divides the gradient buffers.
    original = layer_wise_optimizer.is_managed_by_layer_wise_optimizer

    @functools.wraps(original)
    def is_managed(parameter):
        return original(parameter) and not is_left_to_adamw(parameter)

    layer_wise_optimizer.is_managed_by_layer_wise_optimizer = is_managed


_LISTS = ("dp_cp_params_list", "expt_dp_params_list")


@functools.cache
def repair_gather_of_layer_wise_optimizer() -> None:
    """Gather parameters of the narrower dtype; broadcast all other parameters.

    megatron-core 0.19 receives all parameters in the dtype of the first one. gloo also rejects
    tensors of different sizes.
    """
    optimizer_class: Any = LayerWiseDistributedOptimizer
    original = optimizer_class.allgather_params

    @functools.wraps(original)
    def allgather_params(self):
        lists = {name: getattr(self, name) for name in _LISTS}
        held = [p for each in lists.values() for params in each or () for p in params]
        dtypes = sorted({p.dtype for p in held}, key=lambda dtype: dtype.itemsize)
        if not held:
            return
        whole = torch.distributed.get_backend(self.dp_cp) != "gloo"
        if whole and len(dtypes) == 1:
            original(self)
            return
        gathered: dict[str, Any] = dict.fromkeys(_LISTS)
        alone = dict(lists)
        for name, each in lists.items():
            # The original function uses the dtype of rank 0's first parameter.
            if whole and each is not None and any(p.dtype == dtypes[0] for p in each[0]):
                gathered[name] = [[p for p in ps if p.dtype == dtypes[0]] for ps in each]
                alone[name] = [[p for p in ps if p.dtype != dtypes[0]] for ps in each]
        with _attributes(self, gathered):
            original(self)
        with _attributes(self, alone):
            self.broadcast_params()

    optimizer_class.allgather_params = allgather_params


@contextlib.contextmanager
def _attributes(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)
