"""Helpers for fake kernels of operations on the meta device.

A fake kernel gets the chosen candidate and its arguments and returns meta tensors. It saves and
allocates tensors like the real adapter, including temporaries, which count towards the peak.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import once_differentiable


def take_workspace(like: torch.Tensor, size: int) -> None:
    like.new_empty(size, dtype=torch.uint8)


def empty_sums(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def differentiable(
    inputs: Sequence[torch.Tensor | None],
    forward: Callable,
    backward: Callable,
    workspace_bytes: int = 0,
    results: int = 1,
):
    """Return the first ``results`` outputs of ``forward``, differentiable in ``inputs``.

    Args:
        forward: called with the inputs; returns outputs and the tensors saved for the backward.
            Autograd allocates a zero gradient for each further output.
        backward: called with the saved tensors; returns the gradients.
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
