"""Lifetime of CUDA graph inputs that torch's operations save for backward.

With transformer-engine, megatron-core 0.19 frees these inputs after forward capture, which corrupts
gradients of each layer's first norm.
"""

import functools

from megatron_dsa.patches import replace


@functools.cache
def keep_graph_buffers_until_backward() -> None:
    """Keep a captured layer's inputs and outputs until its backward is captured.

    This costs one hidden state per captured layer and microbatch in flight.
    """
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    @replace(_CudaGraphRunner, "_weakref_forward_buffers")
    def weakref_forward_buffers(release, self, preserve_forward_to_backward_lifetimes):
        # Megatron calls this function with False after capturing the backward.
        if not preserve_forward_to_backward_lifetimes:
            release(self, False)
