"""Functions without a second derivative, and the pass of a recomputed layer."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorate a ``backward`` without a second derivative: it raises with ``create_graph=True``.

    torch's decorator of the same name raises in the second backward pass, and only if the incoming
    gradient required grad (not for a loss that is linear in the output) and the pass is not limited
    to some inputs, as ``torch.autograd.grad`` is. Otherwise the second derivative is silently
    missing.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled():  # in a backward pass: create_graph=True
            name = type(ctx).__name__.removesuffix("Backward").lstrip("_")
            raise RuntimeError(
                f"{name} has no second derivative: compute gradients without create_graph=True"
            )
        return backward(ctx, *grads)

    return once


def differentiable(*tensors: torch.Tensor) -> bool:
    """Return whether autograd records operations on one of ``tensors``."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def in_backward() -> bool:
    """Return whether this code runs inside a backward pass, as a recomputed layer does.

    Figures that are logged once per microbatch skip that pass.
    """
    return torch._C._current_graph_task_id() != -1
