"""Gathering keys under other work, with a gradient that is summed over ranks in fp32.

Each rank makes the keys of some tokens, all ranks need all keys, and the gradient of a key is a sum
over the queries of all ranks. :func:`start_gather` starts a gather and one of two functions waits
for it; calls in between run while the keys travel:

* :func:`finish_with_proxy` returns keys without gradient, and an fp32 tensor without content that
  stands for their gradient (a *grad_proxy*). Attention sends its fp32 accumulator there: it is
  rounded once, after the sum over ranks.
* :func:`finish_with_gradient` returns keys whose gradient autograd rounds to their dtype before
  that sum.

Autograd runs backwards: the reduction starts in the backward of the second call, and the backward
of the first one waits for it.
"""

from typing import NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.capture import tensor_cache
from megatron_dsa.ops.common.collectives import (
    Travel,
    all_gather_async,
    reduce_scatter_async,
    several,
)


class Gathering(NamedTuple):
    """A gather between start and finish."""

    #: Connects both in autograd; on one rank the keys themselves.
    token: torch.Tensor
    out: Travel
    back: Travel
    group: object


def start_gather(keys: torch.Tensor, group) -> Gathering:
    """Start to gather ``keys [tokens, ...]`` of every rank of ``group`` (``None``: one rank)."""
    out, back = all_gather_async(keys, group), Travel()
    token = _Launch.apply(keys, back) if several(group) else keys
    return Gathering(token, out, back, group)


def finish_with_proxy(gathering: Gathering) -> tuple[torch.Tensor, torch.Tensor]:
    """Wait for the keys.

    Returns:
        ``keys [tokens * ranks, D]`` without gradient, one rank's after the other (leading dims
        flattened), and ``grad_proxy``, alike, in fp32 (fp64 for fp64).
    """
    token, out, back, group = gathering
    if not several(group):
        token = _Launch.apply(token, back)
    return _Arrive.apply(token, out, back, group)


def finish_with_gradient(gathering: Gathering, local=None, group=None) -> torch.Tensor:
    """Wait for keys that carry their gradient themselves, in their dtype.

    Args:
        gathering: from :func:`start_gather`.
        local: picks the tokens whose gradient is summed over ``group``: of all tokens ``[tokens *
            ranks, D]`` those of one rank of ``group`` after the other. ``None``: all tokens, and
            the sum is over the gathering's group.
        group: see ``local``.
    """
    if local is None and not several(gathering.group):
        return gathering.token.flatten(0, -2)
    group = gathering.group if local is None else group
    return _ArriveWithGradient.apply(gathering.token, gathering.out, gathering.back, local, group)


def grad_proxy_for(keys: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that stands for the fp32 gradient of ``keys [tokens, D]``."""
    return _nothing(keys.shape, accumulation_dtype(keys.dtype), keys.device)


def _nothing(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _zero(dtype, device).expand(shape)


@tensor_cache(16)
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, back):
        ctx.back, ctx.shape, ctx.dtype = back, keys.shape, keys.dtype
        return grad_proxy_for(keys.detach().flatten(0, -2))

    @staticmethod
    @once_differentiable
    def backward(ctx, _token):
        return ctx.back.wait().view(ctx.shape).to(ctx.dtype), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, out, back, group):
        ctx.back, ctx.group = back, group
        keys = out.wait().flatten(0, -2)
        ctx.mark_non_differentiable(keys)
        ctx.set_materialize_grads(False)  # of the keys, which have none
        proxy = grad_proxy_for(keys)
        ctx.of_proxy = proxy.shape, proxy.dtype, proxy.device
        return keys, proxy

    @staticmethod
    @once_differentiable
    def backward(ctx, _keys, grad):
        if grad is None:  # other ranks take part
            shape, dtype, device = ctx.of_proxy
            grad = torch.zeros(shape, dtype=dtype, device=device)
        shape = ctx.back.begin(reduce_scatter_async(grad, ctx.group))
        # The result is not there yet: _Launch takes it from where it travels.
        return _nothing(shape, grad.dtype, grad.device), None, None, None


class _ArriveWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, out, back, local, group):
        ctx.back, ctx.local, ctx.group = back, local, group
        return out.wait().flatten(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        wide = grad.to(accumulation_dtype(grad.dtype))
        part = wide if ctx.local is None else ctx.local(wide)
        shape = ctx.back.begin(reduce_scatter_async(part, ctx.group))
        return _nothing(shape, wide.dtype, wide.device), None, None, None, None


def gathered_product(
    x: torch.Tensor, grad_proxy: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return ``x @ weight.t()`` for gathered ``x``, whose gradient goes to its proxy unrounded.

    The gradient of ``weight`` comes from this rank's queries.

    Args:
        x: ``[keys, A]`` of all ranks, without gradient; grad_proxy: fp32 (fp64 for fp64) ``[keys,
            A]``. Both are columns of the results of :func:`finish_with_proxy`.
        weight: ``[B, A]``.

    Returns:
        ``[keys, B]`` in the dtype of ``x``.
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
