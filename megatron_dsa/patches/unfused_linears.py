"""Fused gradient accumulation with transformer-engine but without Apex.

megatron-core 0.19 also enables fusion for Megatron's linears and raises if Apex is missing.
"""

import functools
from typing import Any

from megatron_dsa.errors import require
from megatron_dsa.patches import replace


@functools.cache
def leave_linears_unfused_without_apex() -> None:
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return
    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):

        @replace(linear, "__init__")
        def __init__(original, self, *args, config, **kwargs):
            fused = config.gradient_accumulation_fusion
            require_kernel_of_deferred_gradients(config)
            config.gradient_accumulation_fusion = False
            try:
                original(self, *args, config=config, **kwargs)
            finally:
                config.gradient_accumulation_fusion = fused


def require_kernel_of_deferred_gradients(config: Any) -> None:
    """Check that Apex's kernel exists if the output layer's weight gradient is deferred."""
    from megatron.core.tensor_parallel import layers

    deferred = config.gradient_accumulation_fusion and config.defer_embedding_wgrad_compute
    require(
        not deferred or layers._grad_accum_fusion_available,
        "--defer-embedding-wgrad-compute needs Apex's kernel fused_weight_gradient_mlp_cuda: "
        "install Apex with --cpp_ext and --cuda_ext, or drop it",
    )
