"""Dense causal attention over context-parallel ranks, differentiable."""

from typing import Any

import torch
from torch import distributed

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.dense_attention.blocks import BlockAttention, choose
from megatron_dsa.ops.dense_attention.ring.combine import Combined
from megatron_dsa.ops.dense_attention.ring.exchange import Gathered, Ring, RingExchange
from megatron_dsa.ops.dense_attention.ring.payload import KeysAndValues, Latent
from megatron_dsa.ops.dense_attention.ring.shards import TokenShard
from megatron_dsa.ops.dispatch import describe_call
from megatron_dsa.ops.dispatch.support import OpCall


def describe_dense_call(q: torch.Tensor, v_dim: int, packed: bool) -> OpCall:
    """Describe a call of dense attention to dispatch."""
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
    """Attend causally to the keys of all ranks, whose keys and values go round a ring.

    Args:
        q, k: ``[tokens, H, Dqk]``, local tokens; v: ``[tokens, H, Dv]``. All of one dtype.
        shard: the tokens of this rank; made by
            :func:`megatron_dsa.ops.dense_attention.ring.api.token_shard`.
        group: the context-parallel process group; not used if ``shard.cp`` is 1.
        softmax_scale: factor on ``q . k``.
        block: attention to one block, or its name; ``None`` takes the best one that can run.

    Returns:
        ``out [tokens, H, Dv]`` in the dtype of ``q``, 0 for tokens without keys, and the
        natural-log ``lse [tokens, H]`` in fp32 (fp64 for fp64), ``-inf`` for such tokens. ``lse``
        has no gradient.

    Raises:
        ConfigError: shapes, dtypes, rows and group do not fit together, or no block has that name.
        ImplementationError: the block of that name cannot run here.
    """
    _check(q, shard, {"k": k, "v": v})
    _check_group(shard, group)
    if k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ConfigError(
            "k must have the shape of q, and v its rows and heads, got q "
            f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; repeat the heads of grouped "
            "queries' keys."
        )
    kernel = _kernel_for(block, q, v.shape[2], shard)
    q = q.contiguous()
    if shard.cp == 1:
        (own,) = shard.parts(shard.rank)
        return _OneBlockAttention.apply(q, k, v, own.sequences, kernel, softmax_scale)
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
    """Attend as :func:`ring_attention` does, where the MLA latents of all ranks are there.

    Head ``h`` has keys ``[latents[:, :R] @ w_uk[h].T, latents[:, R:]]`` and values
    ``latents[:, :R] @ w_uv[h].T``. They are made of one rank's block at a time, in the backward
    again. Nothing is sent.

    Args:
        q, shard, softmax_scale, block: see :func:`ring_attention`; ``q`` is rotated.
        latents: ``[cp * tokens, R + P]``, one rank's after the other: normalised, and the ``P``
            rope dims rotated.
        w_uk: ``[H, Dqk - P, R]``; w_uv: ``[H, Dv, R]``, weights of the local heads. Their gradients
            are summed over blocks in fp32; they are of this rank's queries, so that they want the
            sum over context-parallel ranks that Megatron's gradient reduction does.
        latent_grad: like ``latents`` in fp32 (fp64 for fp64), without content: if given, the
            gradient of ``latents`` is sent here, unrounded, instead of to ``latents`` (see
            :func:`megatron_dsa.layers.parallel.gather.finish_with_proxy`). It is of this rank's
            queries: to be summed over ranks.

    Returns:
        ``out`` and ``lse`` as of :func:`ring_attention`.

    Raises:
        ConfigError, ImplementationError: see :func:`ring_attention`.
    """
    wanted = accumulation_dtype(latents.dtype), latents.shape
    given = wanted if latent_grad is None else (latent_grad.dtype, latent_grad.shape)
    if given != wanted:
        raise ConfigError(
            f"latent_grad must be {wanted[0]} {list(wanted[1])} for these latents, got {given[0]} "
            f"{list(given[1])}; pass the proxy that "
            "megatron_dsa.layers.parallel.gather.finish_with_proxy returned."
        )
    _check(q, shard, {"latents": latents, "w_uk": w_uk, "w_uv": w_uv})
    keys, rank = shard.cp * q.shape[0], w_uk.shape[-1]
    rope = latents.shape[-1] - rank
    fits = (
        latents.dim() == 2 and latents.shape[0] == keys and rope >= 0
        and w_uk.shape == (q.shape[1], q.shape[2] - rope, rank)
        and w_uv.dim() == 3 and w_uv.shape[::2] == (q.shape[1], rank)
    )  # fmt: skip
    if not fits:
        raise ConfigError(
            f"latents must be [{keys}, R + P], w_uk [H, Dqk - P, R] and w_uv [H, Dv, R] for "
            f"q [rows, H, Dqk], got q {list(q.shape)}, latents {list(latents.shape)}, w_uk "
            f"{list(w_uk.shape)}, w_uv {list(w_uv.shape)}; split the weight of linear_kv_up_proj "
            "by heads, and there into keys and values."
        )
    kernel = _kernel_for(block, q, w_uv.shape[1], shard)
    blocks = Gathered(shard.cp, shard.rank)
    return _LatentAttention.apply(
        q.contiguous(), latents, latent_grad, w_uk, w_uv, shard, blocks, kernel, softmax_scale
    )


def attend(q, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the blocks of all ranks, one after the other.

    Args:
        payload: content of a block, ``KeysAndValues`` or ``Latent``.
        blocks: where they come from, ``Ring`` or ``Gathered``.
    """
    combined = Combined(q.dtype)
    left = sum(len(shard.parts(source)) for source in range(shard.cp))
    for source, block in blocks.blocks(payload.local, payload.disposable):
        for part in shard.parts(source):
            left -= 1
            k, v = payload.expand(block, part.keys)
            out, lse = kernel.forward(q[part.queries], k, v, part.causal, scale, part.sequences)
            combined.add(out, lse, part.queries, last=left == 0)
            # Freed before the next block's are made.
            del k, v, out, lse
    return combined.out, combined.lse


def gradients(dout, q, out, lse, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, Any]:
    """Return ``dq`` of :func:`attend`, and the gradient of ``payload.local`` in fp32 (fp64)."""
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
    """A ring of one: nothing is copied for sending, and nothing is combined."""

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
        # Tensors travel through save_for_backward alone, so that recompute and offloading see them.
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
        to_latent, to_proxy = None, d_latent
        if not ctx.has_proxy:
            to_latent, to_proxy = d_latent.to(latent.dtype), None
        return dq, to_latent, to_proxy, dw_uk, dw_uv, None, None, None, None


def _kernel_for(block, q: torch.Tensor, v_dim: int, shard: TokenShard) -> BlockAttention:
    if isinstance(block, BlockAttention):
        return block
    return choose(describe_dense_call(q, v_dim, shard.packed), block)


def _check(q: torch.Tensor, shard: TokenShard, others: dict[str, torch.Tensor]) -> None:
    fix = "make rows for its batch, and flatten [s, b, H, D] to [s * b, H, D]"
    require_tensor("q", q, (shard.tokens, "H", "Dqk"), FLOATS, fix=fix)
    for name, x in others.items():
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"{name} must have the dtype and device of q, {q.dtype} on {q.device}, got "
                f"{x.dtype} on {x.device}; convert it before."
            )


def _check_group(shard: TokenShard, group) -> None:
    if shard.cp == 1:
        return
    found = distributed.get_world_size(group), distributed.get_rank(group)
    if found != (shard.cp, shard.rank):
        raise ConfigError(
            f"shard.cp and shard.rank must be those of group, {found}, got "
            f"{(shard.cp, shard.rank)}; "
            "build rows and group from the same context-parallel group."
        )
