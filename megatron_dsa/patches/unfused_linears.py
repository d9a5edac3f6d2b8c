"""Fused gradient accumulation without Apex: transformer-engine's linears fuse, Megatron's do not.

transformer-engine adds weight gradients to Megatron's main gradients in its own matrix products.
megatron-core 0.19 sets the same for its own linears, such as the output layer, and raises where
Apex's kernel is missing.
"""

import functools
from typing import Any

from megatron_dsa.errors import require
from megatron_dsa.patches import replace


@functools.cache
def leave_linears_unfused_without_apex() -> None:
    """Let Megatron's own linears leave their weight gradients to autograd if Apex is missing."""
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
    """Raise :class:`ConfigError` for an output layer whose gradient Apex's kernel is to compute."""
    from megatron.core.tensor_parallel import layers

    deferred = config.gradient_accumulation_fusion and config.defer_embedding_wgrad_compute
    require(
        not deferred or layers._grad_accum_fusion_available,
        "--defer-embedding-wgrad-compute needs Apex's kernel fused_weight_gradient_mlp_cuda: "
        "install Apex with --cpp_ext and --cuda_ext, or drop it",
    )
