"""Functions without a second derivative, and which pass of a recomputed layer this is."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorate the ``backward`` of an autograd function that has no second derivative.

    The backward pass raises with ``create_graph=True``. The decorator of the same name in
    ``torch.autograd.function`` raises later, in the backward pass through the gradient, but only if
    the incoming gradient required grad (not for a loss that is linear in the output) and if that
    pass is not limited to some inputs, as ``torch.autograd.grad`` is. Otherwise the second
    derivative is silently missing.

    Raises:
        RuntimeError: in a backward pass with ``create_graph=True``.
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


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, as a layer that is computed again does.

    What belongs to a microbatch once (a logged figure, a captured selection) must skip that pass.
    """
    return torch._C._current_graph_task_id() != -1
