"""Autograd without second derivatives, detection of recomputation."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorate a ``backward`` that has no derivative: it raises with ``create_graph=True``.

    torch's decorator misses incoming gradients that need no grad (a loss linear in the output) and
    passes limited to some inputs: there the second derivative would silently be missing.
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
    """Return whether this runs in a backward pass, as a recomputed layer does."""
    return torch._C._current_graph_task_id() != -1
