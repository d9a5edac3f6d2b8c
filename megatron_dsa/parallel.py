"""Tensor parallelism of the attention core: gathering keys, with an fp32 way back.

Under sequence parallelism each rank holds a slice of the latent keys. All ranks need all keys for
their heads, and the gradient of a key is the sum over all heads: over all ranks. Autograd would
round each rank's part to bf16 before that sum. :func:`gather_keys` therefore returns the keys
together with an fp32 tensor that stands for their gradient; the attention sends its fp32
accumulator there and it is rounded once, after the reduction.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.arithmetic import accumulation_dtype


def gather_rows(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather ``x`` along dim 0 over ``group``, outside of autograd."""
    if group is None or group.size() == 1:
        return x.detach()
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, x.detach().contiguous(), group=group)
    return gathered


def gather_keys(kv: torch.Tensor, group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows of the keys and a channel for their gradient.

    Args:
        kv: ``[s / ranks, b, D]``, this rank's slice (all of it if ``group`` is ``None``).
        group: the tensor-parallel group under sequence parallelism, else ``None``.

    Returns:
        ``keys [s * b, D]`` without gradient, and ``channel [s * b, D]`` in fp32 without content:
        what is sent to it as a gradient is summed over the group in fp32 and becomes kv's gradient.
    """
    return _GatherKeys.apply(kv, group)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, group):
        ctx.group, ctx.shape, ctx.dtype = group, kv.shape, kv.dtype
        keys = gather_rows(kv, group).flatten(0, 1)
        ctx.mark_non_differentiable(keys)
        # No memory: a gradient has to have the shape of what it is the gradient of.
        channel = keys.new_zeros((), dtype=accumulation_dtype(kv.dtype)).expand(keys.shape)
        return keys, channel

    @staticmethod
    def backward(ctx, _dkeys, dchannel):
        grad = dchannel
        if ctx.group is not None and ctx.group.size() > 1:
            grad = dchannel.new_empty(dchannel.shape[0] // ctx.group.size(), dchannel.shape[1])
            torch.distributed.reduce_scatter_tensor(grad, dchannel.contiguous(), group=ctx.group)
        return grad.view(ctx.shape).to(ctx.dtype), None


def join_keys(
    kv: torch.Tensor, compressed: torch.Tensor | None, group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all keys of hybrid attention and a channel for their gradient.

    Args:
        kv: ``[s / ranks, b, D]``, this rank's keys of positions.
        compressed: ``[G, D]``, all compressed keys, the same on every rank; or ``None``.
        group: the tensor-parallel group under sequence parallelism, else ``None``.

    Returns:
        ``keys [G + s * b, D]``, compressed keys first, and ``channel`` as in :func:`gather_keys`.
        Every rank's heads add to the gradient of every key: it is summed over the group in fp32,
        for this rank's slice of ``kv`` and for all of ``compressed``, where all ranks go on with
        the same sum.
    """
    keys, channel = gather_keys(kv, group)
    if compressed is None:
        return keys, channel
    compressed_keys, compressed_channel = _ShareKeys.apply(compressed, group)
    return torch.cat([compressed_keys, keys]), _JoinChannels.apply(compressed_channel, channel)


class _ShareKeys(torch.autograd.Function):
    """Keys that every rank holds in full; their gradient is summed over the ranks in fp32."""

    @staticmethod
    def forward(ctx, keys, group):
        ctx.group, ctx.dtype = group, keys.dtype
        shared = keys.detach()
        ctx.mark_non_differentiable(shared)
        channel = keys.new_zeros((), dtype=accumulation_dtype(keys.dtype)).expand(keys.shape)
        return shared, channel

    @staticmethod
    def backward(ctx, _dkeys, dchannel):
        if ctx.group is not None and ctx.group.size() > 1:
            dchannel = dchannel.contiguous()
            torch.distributed.all_reduce(dchannel, group=ctx.group)
        return dchannel.to(ctx.dtype), None


class _JoinChannels(torch.autograd.Function):
    """Concatenate two channels without giving them memory."""

    @staticmethod
    def forward(ctx, first, second):
        ctx.rows = first.shape[0]
        rows = first.shape[0] + second.shape[0]
        return first.new_zeros(()).expand(rows, first.shape[1])

    @staticmethod
    def backward(ctx, grad):
        return grad[: ctx.rows], grad[ctx.rows :]
