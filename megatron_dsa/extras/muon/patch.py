"""Muon of megatron-core 0.19 with marks on parameters.

Megatron orthogonalises every matrix but embedding and output layer, each as one matrix unless it is
a fused QKV projection. Marks (:mod:`megatron_dsa.layers.weight_blocks`) name tables and stacks of
matrices. Parameters without marks are treated as before.
"""

import dataclasses
import functools

from megatron.core.optimizer import emerging_optimizers, layer_wise_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.tensor_parallel import layers

from megatron_dsa.extras.muon.layer_wise_gather import repair_gather_of_layer_wise_optimizer
from megatron_dsa.extras.muon.optimizer import BlockAdaptiveMuon, BlockMuon
from megatron_dsa.layers.weight_blocks import BLOCK_ROWS, is_left_to_adamw

#: ``--optimizer`` -> its class.
MUON = {"muon": BlockMuon, "adaptive_muon": BlockAdaptiveMuon}


@functools.cache
def read_marks_of_muon() -> None:
    """Let Megatron's Muon read the marks, for the rest of the process; free if called again."""
    # Attributes that fp32 copies of 16-bit parameters get.
    layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS[BLOCK_ROWS] = None
    left = ParamKey(predicate=ParamPredicate(name="left_to_adamw", fn=is_left_to_adamw))
    for name, optimizer_class in MUON.items():
        entry = emerging_optimizers._EMERGING_OPTIMIZERS[name]
        emerging_optimizers._EMERGING_OPTIMIZERS[name] = dataclasses.replace(
            entry,
            optimizer_cls=optimizer_class,
            default_param_overrides={left: {"optimizer": "adam"}},
        )
    # The layer-wise distributed optimizer decides once more when it divides buffers.
    original = layer_wise_optimizer.is_managed_by_layer_wise_optimizer

    @functools.wraps(original)
    def is_managed(parameter):
        return original(parameter) and not is_left_to_adamw(parameter)

    layer_wise_optimizer.is_managed_by_layer_wise_optimizer = is_managed
    repair_gather_of_layer_wise_optimizer()
