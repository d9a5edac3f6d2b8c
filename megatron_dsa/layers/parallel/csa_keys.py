"""Key buffer of V4's attention on several ranks."""

import torch

from megatron_dsa.layers.parallel.gather import grad_proxy_for, start_gather
from megatron_dsa.layers.parallel.groups import (
    Ranks,
    finish_index_gather,
    gather_detached,
    gather_keys,
    scatter_sum,
)
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.halo import Halo


def join_keys_of_ranks(
    kv: torch.Tensor,
    compressed: torch.Tensor | None,
    keys: CompressedKeys | None,
    halo: Halo | None,
    ranks: Ranks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key buffer of V4's attention and its gradient proxy.

    The buffer holds compressed keys by slot, then keys of query tokens, then shared keys of all
    ranks.

    Args:
        kv: ``[s, b, D]``, local keys.
        compressed: ``[G, D]``, local compressed keys.
        keys: slots of ``compressed``.
        halo: halo of the query tokens, ``None`` if one rank has all of them.
    """
    batch = kv.shape[1]
    buffer, grad_proxy = gather_keys(kv, ranks.indexer_tp)
    if halo is not None:
        buffer, grad_proxy = _HoldKeys.apply(buffer, grad_proxy, halo, batch, ranks.query_group)
    if compressed is None:
        return buffer, grad_proxy
    pooled, pooled_proxy = gather_keys(compressed, ranks.group)
    assert keys is not None
    if keys.key_indices is not None:
        pooled, pooled_proxy = _InOrder.apply(pooled, pooled_proxy, keys.key_indices)
    return torch.cat([pooled, buffer]), _JoinProxies.apply(pooled_proxy, grad_proxy)


def index_keys_of_ranks(
    compressed: torch.Tensor, keys: CompressedKeys, ranks: Ranks
) -> torch.Tensor:
    """Return the indexer's compressed keys of all ranks, ``[slots, D]``."""
    if keys.key_indices is None:
        return compressed
    gathered = finish_index_gather(start_gather(compressed, ranks.group), ranks)
    # No query sees a slot without a compressed key.
    return gathered.index_select(0, keys.key_indices.clamp_max(gathered.shape[0] - 1))


def extend(
    tensors: tuple[torch.Tensor, ...], halo: Halo, batch: int, ranks: Ranks
) -> tuple[torch.Tensor, ...]:
    """Prepend tokens of neighbouring ranks to each run of local tokens.

    Each tensor ``[tokens * batch, width]`` becomes ``[halo.length * batch, width]``.
    """
    return _Extend.apply(halo, batch, ranks.group, *tensors)


def _tokens(positions: torch.Tensor, batch: int) -> torch.Tensor:
    if batch == 1:
        return positions
    tokens = positions[:, None] * batch + torch.arange(batch, device=positions.device)
    return torch.where(positions[:, None] < 0, -1, tokens).flatten()


def _share(x: torch.Tensor, halo: Halo, batch: int, group) -> torch.Tensor:
    return torch.cat([x, gather_detached(x.index_select(0, _tokens(halo.shared, batch)), group)])


def _unshare(grad: torch.Tensor, tokens: int, halo: Halo, batch: int, group) -> torch.Tensor:
    local = grad[:tokens].clone()
    return local.index_add_(0, _tokens(halo.shared, batch), scatter_sum(grad[tokens:], group))


class _HoldKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, grad_proxy, halo, batch, group):
        ctx.halo, ctx.batch, ctx.group, ctx.tokens = halo, batch, group, keys.shape[0]
        buffer = _share(keys, halo, batch, group)
        ctx.mark_non_differentiable(buffer)
        return buffer, grad_proxy_for(buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx, _dkeys, grad):
        return None, _unshare(grad, ctx.tokens, ctx.halo, ctx.batch, ctx.group), None, None, None


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, grad_proxy, key_indices):
        ctx.count = keys.shape[0]
        ctx.save_for_backward(key_indices)
        ordered = keys.index_select(0, key_indices.clamp_max(keys.shape[0] - 1))
        ctx.mark_non_differentiable(ordered)
        return ordered, grad_proxy_for(ordered)

    @staticmethod
    @once_differentiable
    def backward(ctx, _dkeys, grad):
        (key_indices,) = ctx.saved_tensors
        # Empty slots write to a spare entry of the buffer.
        back = grad.new_zeros(ctx.count + 1, grad.shape[1])
        return None, back.index_copy_(0, key_indices, grad)[:-1], None


class _JoinProxies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second):
        ctx.count = first.shape[0]
        total = first.shape[0] + second.shape[0]
        return first.new_zeros(()).expand(total, first.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad[: ctx.count], grad[ctx.count :]


class _Extend(torch.autograd.Function):
    """Halo exchange; gradients are exact because each channel of a token is in one group."""

    @staticmethod
    def forward(ctx, halo, batch, group, *tensors):
        ctx.halo, ctx.batch, ctx.group = halo, batch, group
        shared, local = _tokens(halo.shared, batch), _tokens(halo.local, batch)
        before, source = _tokens(halo.before, batch), _tokens(halo.source, batch)
        widths = [x.shape[1] for x in tensors]
        sent = torch.cat([x.index_select(0, shared) for x in tensors], 1)
        received = gather_detached(sent, group).index_select(0, source.clamp_min(0))
        received.masked_fill_((source < 0)[:, None], 0.0)
        results = []
        for x, part in zip(tensors, received.split(widths, 1), strict=True):
            result = x.new_empty(halo.length * batch, x.shape[1])
            results.append(result.index_copy_(0, local, x).index_copy_(0, before, part))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        halo, batch, group = ctx.halo, ctx.batch, ctx.group
        local = _tokens(halo.local, batch)
        before, source = _tokens(halo.before, batch), _tokens(halo.source, batch)
        count = halo.shared.numel() * batch * group.size()
        part = torch.cat([grad.index_select(0, before) for grad in grads], 1)
        part.masked_fill_((source < 0)[:, None], 0.0)
        sent = part.new_zeros(count, part.shape[1]).index_add_(0, source.clamp_min(0), part)
        shared = scatter_sum(sent, group).split([grad.shape[1] for grad in grads], 1)
        results = [
            grad.index_select(0, local).index_add_(0, _tokens(halo.shared, batch), x)
            for grad, x in zip(grads, shared, strict=True)
        ]
        return None, None, None, *results
