"""Helpers of the operations' fakes.

A fake takes the chosen candidate and the arguments of the implementations, and returns meta
tensors. It keeps and allocates what adapters do, also temporaries: they count towards the peak.
Packages that allocate by themselves were measured.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import once_differentiable


def take_workspace(like: torch.Tensor, size: int) -> None:
    """Allocate ``size`` bytes on the device of ``like`` and free them."""
    like.new_empty(size, dtype=torch.uint8)


def empty_sums(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty tensor in the accumulation dtype of ``like``."""
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def differentiable(
    inputs: Sequence[torch.Tensor | None],
    forward: Callable,
    backward: Callable,
    workspace_bytes: int = 0,
    results: int = 1,
):
    """Return the first ``results`` of ``forward``, differentiable in ``inputs``.

    Args:
        inputs: tensors that get a gradient each.
        forward: called with the inputs; returns a tuple of results and the tensors kept for the
            backward. Autograd makes a gradient of zeros for each further result.
        backward: called with the tensors kept; returns the gradients. What it refers to stays
            alive until the backward.
        workspace_bytes: temporary memory of the forward and of the backward.
    """
    found = _Differentiable.apply(forward, backward, (workspace_bytes, results), *inputs)
    return found[0] if results == 1 else found[:results]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, sizes, *inputs):
        workspace_bytes, differentiable_results = sizes
        results, kept = forward(*inputs)
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*results[differentiable_results:])
        ctx.rest = backward, workspace_bytes
        take_workspace(inputs[0], workspace_bytes)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult, *_zeros):
        backward, workspace_bytes = ctx.rest
        take_workspace(dresult, workspace_bytes)
        return None, None, None, *backward(*ctx.saved_tensors)
