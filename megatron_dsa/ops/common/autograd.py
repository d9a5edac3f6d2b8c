"""Autograd helpers: functions without a second derivative, detection of recomputation."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorate a ``backward`` that has no derivative: it raises with ``create_graph=True``.

    torch's decorator only raises in the second backward, and not if the incoming gradient needs no
    grad (a loss linear in the output) or the pass is limited to some inputs
    (``torch.autograd.grad``): there the second derivative is silently missing.
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
    """Return whether autograd records operations on any of ``tensors``."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def in_backward() -> bool:
    """Return whether this runs in a backward pass, as a recomputed layer does.

    Figures logged once per microbatch skip that pass.
    """
    return torch._C._current_graph_task_id() != -1
