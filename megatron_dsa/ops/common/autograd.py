"""Helpers of autograd functions without second derivatives."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorate a ``backward`` so that it raises under ``create_graph=True``.

    torch's decorator does not raise if the loss is linear in the output, since its gradient then
    needs no grad; the second derivative would silently be missing.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled():
            name = type(ctx).__name__.removesuffix("Backward").lstrip("_")
            raise RuntimeError(
                f"{name} has no second derivative: compute gradients without create_graph=True"
            )
        return backward(ctx, *grads)

    return once


def differentiable(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass now, e.g. to recompute a layer."""
    return torch._C._current_graph_task_id() != -1
