"""Inputs of CUDA graphs that native operations of torch save for their backward pass.

With transformer-engine installed, megatron-core 0.19 frees the memory of a graph's inputs and
outputs after the forward capture, unless a ``torch.autograd.Function`` saved them. Operations that
torch implements in C++, such as the norms of local layers, save them unseen: other tensors are
captured in that memory, and gradients of the first norm of every layer are wrong.
"""

import functools

from megatron_dsa.patches import replace


@functools.cache
def keep_graph_buffers_until_backward() -> None:
    """Keep inputs and outputs of a captured layer until its backward pass is captured.

    Takes the memory of one hidden state per captured layer and microbatch in flight.
    """
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    @replace(_CudaGraphRunner, "_weakref_forward_buffers")
    def weakref_forward_buffers(release, self, preserve_forward_to_backward_lifetimes):
        # Megatron calls it again, with False, behind the capture of the backward pass.
        if not preserve_forward_to_backward_lifetimes:
            release(self, False)
