"""Asynchronous gather of keys, and the sum of their gradients over ranks.

Other work may run between start and finish, in forward and backward::

    forward    keys --> start_gather ~~ all-gather ~~~~~~> finish_* --> keys of all ranks
    backward   sum <-- start_gather <~~ reduce-scatter ~~~ finish_* <-- gradient in fp32

A *grad_proxy*, an fp32 tensor without memory, receives attention's fp32 accumulator, so gradients
are rounded only after the sum over ranks.
"""

from typing import NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.capture import tensor_cache
from megatron_dsa.ops.common.collectives import (
    Transfer,
    all_gather_async,
    reduce_scatter_async,
    several,
)


class Gathering(NamedTuple):
    #: Tensor that connects start and finish of the gather in autograd.
    link: torch.Tensor
    keys: Transfer
    #: Gradient transfer that the backward of ``finish_*`` starts.
    gradient: Transfer
    group: object


def start_gather(keys: torch.Tensor, group) -> Gathering:
    """Start the all-gather of ``keys [tokens, ...]`` over ``group`` (``None``: one rank)."""
    gathered, gradient = all_gather_async(keys, group), Transfer()
    link = _Start.apply(keys, gradient) if several(group) else keys
    return Gathering(link, gathered, gradient, group)


def finish_with_proxy(gathering: Gathering) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gathered keys ``[tokens * ranks, D]`` and ``grad_proxy`` in fp32 (fp64 for fp64)."""
    if not several(gathering.group):
        gathering = gathering._replace(link=_Start.apply(gathering.link, gathering.gradient))
    return _FinishWithProxy.apply(gathering.link, gathering)


def finish_with_gradient(gathering: Gathering, pick=None, group=None) -> torch.Tensor:
    """Return the gathered keys; their gradient is rounded before ranks sum it.

    ``pick`` slices the gradient ``[tokens * ranks, D]`` to the tokens that ``group`` sums.
    """
    if pick is not None:
        gathering = gathering._replace(group=group)
    elif not several(gathering.group):
        return gathering.link.flatten(0, -2)
    return _FinishWithGradient.apply(gathering.link, gathering, pick)


def grad_proxy_for(keys: torch.Tensor) -> torch.Tensor:
    return _without_memory(keys.shape, accumulation_dtype(keys.dtype), keys.device)


def _without_memory(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _zero(dtype, device).expand(shape)


@tensor_cache(16)
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, gradient):
        ctx.gradient, ctx.shape, ctx.dtype = gradient, keys.shape, keys.dtype
        return grad_proxy_for(keys.detach().flatten(0, -2))

    @staticmethod
    @once_differentiable
    def backward(ctx, _link):
        return ctx.gradient.wait().view(ctx.shape).to(ctx.dtype), None


def _send_back(gathering: Gathering, grad: torch.Tensor) -> torch.Tensor:
    """Start to sum ``grad`` over ranks; return a placeholder gradient for ``gathering.link``."""
    shape = gathering.gradient.take_over(reduce_scatter_async(grad, gathering.group))
    return _without_memory(shape, grad.dtype, grad.device)


class _FinishWithProxy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, gathering):
        ctx.gathering = gathering
        keys = gathering.keys.wait().flatten(0, -2)
        ctx.mark_non_differentiable(keys)
        ctx.set_materialize_grads(False)
        proxy = grad_proxy_for(keys)
        ctx.of_proxy = proxy.shape, proxy.dtype, proxy.device
        return keys, proxy

    @staticmethod
    @once_differentiable
    def backward(ctx, _keys, grad):
        if grad is None:  # other ranks wait in the reduce-scatter
            shape, dtype, device = ctx.of_proxy
            grad = torch.zeros(shape, dtype=dtype, device=device)
        return _send_back(ctx.gathering, grad), None


class _FinishWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, gathering, pick):
        ctx.gathering, ctx.pick = gathering, pick
        return gathering.keys.wait().flatten(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        wide = grad.to(accumulation_dtype(grad.dtype))
        return _send_back(ctx.gathering, wide if ctx.pick is None else ctx.pick(wide)), None, None


def gathered_product(
    x: torch.Tensor, grad_proxy: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return ``x @ weight.t()``; the unrounded gradient of ``x`` goes to ``grad_proxy``.

    ``x``, ``grad_proxy``: ``[keys, A]`` from :func:`finish_with_proxy`; ``weight [B, A]``.
    """
    return _GatheredProduct.apply(x, grad_proxy, weight)


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, _grad_proxy, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_proxy = dweight = None
        if ctx.needs_input_grad[1]:
            to_proxy = mm(grad, weight)
        if ctx.needs_input_grad[2]:
            dweight = mm(grad.t(), x).to(weight.dtype)
        return None, to_proxy, dweight
