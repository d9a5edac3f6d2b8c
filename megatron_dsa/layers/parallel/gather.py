"""Gathering keys under other work, with an fp32 way back.

Under sequence and context parallelism each rank makes the keys of some tokens. All ranks need all
keys, and the gradient of a key is the sum over all queries: over all ranks. Autograd would round
each rank's part to bf16 before that sum. :func:`finish_gather` therefore returns the keys together
with an fp32 tensor that stands for their gradient (a *grad_proxy*); the attention sends its fp32
accumulator there and it is rounded once, after the reduction.

:func:`start_gather` starts a gather, :func:`finish_gather` waits for it; calls in between run while
the keys travel. Autograd runs backwards from the last call to the first: the reduction of the
gradient starts in the backward of ``finish_gather``, and that of ``start_gather`` waits for it,
after the backward of the calls in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.capture import tensor_cache


@dataclass
class _Travel:
    """A collective under way, and its result."""

    result: torch.Tensor | None = None
    work: Any = None

    def begin(self, other: _Travel) -> torch.Size:
        """Take over a collective that was started; return the shape of its result."""
        assert other.result is not None
        self.result, self.work = other.result, other.work
        return other.result.shape

    def wait(self) -> torch.Tensor:
        """Return the result; the current stream waits for it."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        result, self.result = self.result, None
        assert result is not None
        return result


class Gathering(NamedTuple):
    """A gather between :func:`start_gather` and :func:`finish_gather`."""

    #: Connects both in autograd; on one rank the keys themselves.
    token: torch.Tensor
    out: _Travel
    back: _Travel
    group: object


def start_gather(keys: torch.Tensor, group) -> Gathering:
    """Start to gather ``keys [tokens, ...]`` of every rank of ``group`` (``None``: one rank)."""
    out, back = all_gather_async(keys, group), _Travel()
    token = _Launch.apply(keys, back) if _several(group) else keys
    return Gathering(token, out, back, group)


def finish_gather(gathering: Gathering) -> tuple[torch.Tensor, torch.Tensor]:
    """Wait for the keys.

    Returns:
        ``keys [tokens * ranks, D]`` without gradient, one rank's after the other (leading dims
        flattened), and ``grad_proxy``, alike, in fp32 without content: what is sent to it as a
        gradient is summed over the group in fp32 and becomes that of this rank's keys.
    """
    token, out, back, group = gathering
    if not _several(group):
        token = _Launch.apply(token, back)
    return _Arrive.apply(token, out, back, group)


def finish_gather_with_gradient(gathering: Gathering, own=None, group=None) -> torch.Tensor:
    """Wait for keys that carry their gradient themselves, in their dtype.

    Args:
        gathering: from :func:`start_gather`.
        own: picks the tokens whose gradient is summed over ``group``: of all rows ``[tokens *
            ranks, D]`` those of one rank of ``group`` after the other. ``None``: all tokens, and
            the sum is over the gathering's group.
        group: see ``own``.
    """
    if own is None and not _several(gathering.group):
        return gathering.token.flatten(0, -2)
    group = gathering.group if own is None else group
    return _ArriveWithGradient.apply(gathering.token, gathering.out, gathering.back, own, group)


def grad_proxy_for(keys: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that stands for the fp32 gradient of ``keys [tokens, D]``."""
    return _nothing(keys.shape, accumulation_dtype(keys.dtype), keys.device)


def _nothing(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory of its own, whose content nothing reads."""
    return _zero(dtype, device).expand(shape)


@tensor_cache(16)
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _several(group) -> bool:
    return group is not None and group.size() > 1


def all_gather_async(x: torch.Tensor, group) -> _Travel:
    """Start an all-gather along dim 0, outside of autograd."""
    if not _several(group):
        return _Travel(x.detach())
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = torch.distributed.all_gather_into_tensor(
        gathered, x.detach().contiguous(), group=group, async_op=True
    )
    return _Travel(gathered, work)


def reduce_scatter_async(x: torch.Tensor, group) -> _Travel:
    """Start to sum ``x`` over ``group``; the result is this rank's part along dim 0."""
    if not _several(group):
        return _Travel(x)
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    work = torch.distributed.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=True)
    return _Travel(part, work)


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
        token = _nothing(shape, grad.dtype, grad.device)
        return token, None, None, None


class _ArriveWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, out, back, own, group):
        ctx.back, ctx.own, ctx.group = back, own, group
        return out.wait().flatten(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        wide = grad.to(accumulation_dtype(grad.dtype))
        part = wide if ctx.own is None else ctx.own(wide)
        shape = ctx.back.begin(reduce_scatter_async(part, ctx.group))
        token = _nothing(shape, wide.dtype, wide.device)
        return token, None, None, None, None


def gathered_product(
    x: torch.Tensor, grad_proxy: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return ``x @ weight.t()`` for gathered ``x``, whose gradient goes to its proxy unrounded.

    The gradient of ``weight`` is of this rank's queries: of the part of the loss that they have.

    Args:
        x: ``[keys, A]`` of all ranks, without gradient; grad_proxy: fp32 (fp64 for fp64) ``[keys,
            A]``. Both are columns of what :func:`finish_gather` returns.
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
