"""The layer-wise distributed optimizer with parameters of two precisions, and over gloo.

After a step each data-parallel rank sends the parameters that it updated. megatron-core 0.19 makes
one flat tensor of them and receives into tensors of the first parameter's dtype: 16-bit and fp32
parameters in one model do not fit. gloo also refuses parts of different sizes.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

#: Attributes with a list of parameters per rank, ``None`` where there is one rank.
_LISTS = ("dp_cp_params_list", "expt_dp_params_list")


@functools.cache
def repair_gather_of_layer_wise_optimizer() -> None:
    """Gather parameters of the narrower dtype at once, and broadcast the others one by one."""
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
            # The original takes the dtype of rank 0's first parameter.
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
