"""Autograd functions of dense causal attention over context-parallel ranks."""

from typing import Any

import torch
from torch import distributed

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dense_attention.blocks import BlockAttention, choose
from megatron_dsa.ops.dense_attention.ring.combine import Combined
from megatron_dsa.ops.dense_attention.ring.exchange import (
    Gathered,
    KeysAndValues,
    Latent,
    Ring,
    RingExchange,
)
from megatron_dsa.ops.dense_attention.ring.shards import TokenShard
from megatron_dsa.ops.dispatch import describe_call
from megatron_dsa.ops.dispatch.support import OpCall


def describe_dense_call(q: torch.Tensor, v_dim: int, packed: bool) -> OpCall:
    return describe_call(
        q.device, dtype=q.dtype, heads=q.shape[1], qk_dim=q.shape[2], v_dim=v_dim, packed=packed
    )


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: TokenShard,
    group,
    softmax_scale: float,
    block: BlockAttention | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally to keys and values that ranks pass around a ring.

    ``block``: kernel for one block, or its name; by default dispatch chooses.
    """
    if shard.cp > 1:
        found = distributed.get_world_size(group), distributed.get_rank(group)
        require(
            found == (shard.cp, shard.rank),
            "layout must be sharded over group: rank and size in it are "
            f"{(shard.rank, shard.cp)}, in group {found[::-1]}; build both from the same "
            "context-parallel group",
        )
    kernel = _kernel_for(block, q, v.shape[2], shard)
    q = q.contiguous()
    if shard.cp == 1:
        (part,) = shard.parts(shard.rank)
        return _OneBlockAttention.apply(q, k, v, part.sequences, kernel, softmax_scale)
    blocks = Ring(lambda: RingExchange(group, shard.cp, shard.rank), shard.cp, shard.rank)
    return _KeyValueAttention.apply(q, k, v, shard, blocks, kernel, softmax_scale)


def gathered_latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    shard: TokenShard,
    softmax_scale: float,
    block: BlockAttention | str | None = None,
    latent_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = _kernel_for(block, q, w_uv.shape[1], shard)
    blocks = Gathered(shard.cp, shard.rank)
    return _LatentAttention.apply(
        q.contiguous(), latents, latent_grad, w_uk, w_uv, shard, blocks, kernel, softmax_scale
    )


def attend(q, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, torch.Tensor]:
    combined = Combined(q.dtype)
    left = sum(len(shard.parts(source)) for source in range(shard.cp))
    for source, block in blocks.blocks(payload.local, payload.disposable):
        for part in shard.parts(source):
            left -= 1
            k, v = payload.expand(block, part.keys)
            out, lse = kernel.forward(q[part.queries], k, v, part.causal, scale, part.sequences)
            combined.add(out, lse, part.queries, last=left == 0)
            del k, v, out, lse
    return combined.out, combined.lse


def gradients(dout, q, out, lse, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, Any]:
    acc = accumulation_dtype(q.dtype)
    collected = blocks.gradients(payload.local.shape, acc, q.device)
    dq = None
    for source, block in blocks.blocks(payload.local, payload.disposable):
        collected.start()
        for part in shard.parts(source):
            k, v = payload.expand(block, part.keys)
            mine = part.queries
            dq_part, dk, dv = kernel.backward(
                dout[mine], q[mine], k, v, out[mine], lse[mine], part.causal, scale, part.sequences
            )
            del k, v
            if dq is None:
                dq = dq_part if shard.cp == 1 else dq_part.to(acc)
            else:
                dq[mine] += dq_part
            payload.add_gradients(block, part.keys, lambda s=source: collected.target(s), dk, dv)
            del dq_part, dk, dv
    assert dq is not None
    return dq.to(q.dtype), collected.home()


class _OneBlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sequences, kernel, scale):
        out, lse = kernel.forward(q, k, v, True, scale, sequences)
        out, lse = out.to(q.dtype).contiguous(), lse.contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (True, scale, sequences)
        ctx.kernel = kernel
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.kernel.backward(dout.contiguous(), q, k, v, out, lse, *ctx.settings)
        return *(x.to(q.dtype) for x in gradients), None, None, None


class _KeyValueAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, shard, blocks, kernel, scale):
        out, lse = attend(q, KeysAndValues(k, v), shard, blocks, kernel, scale)
        # Recompute and offloading work only on tensors in save_for_backward.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (shard, blocks, kernel, scale)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        payload = KeysAndValues(k, v)
        dq, d_local = gradients(dout.contiguous(), q, out, lse, payload, *ctx.settings)
        return dq, *payload.split(d_local), None, None, None, None


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, latent, latent_grad, w_uk, w_uv, shard, blocks, kernel, scale):
        out, lse = attend(q, Latent(latent, w_uk, w_uv), shard, blocks, kernel, scale)
        ctx.save_for_backward(q, latent, w_uk, w_uv, out, lse)
        ctx.settings = (shard, blocks, kernel, scale)
        ctx.has_proxy = latent_grad is not None
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        q, latent, w_uk, w_uv, out, lse = ctx.saved_tensors
        payload = Latent(latent, w_uk, w_uv)
        dq, d_latent = gradients(dout.contiguous(), q, out, lse, payload, *ctx.settings)
        assert payload.dw_uk is not None and payload.dw_uv is not None
        dw_uk = payload.dw_uk.view(w_uk.shape).to(w_uk.dtype)
        dw_uv = payload.dw_uv.view(w_uv.shape).to(w_uv.dtype)
        proxied = (None, d_latent) if ctx.has_proxy else (d_latent.to(latent.dtype), None)
        return dq, *proxied, dw_uk, dw_uv, None, None, None, None


def _kernel_for(block, q: torch.Tensor, v_dim: int, shard: TokenShard) -> BlockAttention:
    if isinstance(block, BlockAttention):
        return block
    return choose(describe_dense_call(q, v_dim, shard.packed), block)
