"""Dense attention on one or several context-parallel ranks."""

import dataclasses
from typing import Any

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_layout, require_scale, require_tensor
from megatron_dsa.ops.dense_attention.ring import attention
from megatron_dsa.ops.dense_attention.ring.attention import describe_dense_call
from megatron_dsa.ops.dense_attention.ring.shards import (
    ContiguousShard,
    PackedRuns,
    PackedZigzagShard,
    TokenShard,
    ZigzagShard,
)
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding, padded_bound


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    softmax_scale: float,
    group=None,
    policy: Policy = Policy(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally to all visible keys (stages ``dense`` and ``warmup``).

    Args:
        q, k: ``[tokens, H, D]``, local.
        v: ``[tokens, H, Dv]``, local.
        layout: visible keys of each query.
        softmax_scale: factor on ``q . k``.
        group: context-parallel process group of ``layout``, if sharded.

    Returns:
        ``out [tokens, H, Dv]`` in q's dtype, and the natural log-sum-exp ``lse [tokens, H]``, fp32
        (fp64), without gradient. Tokens without visible keys get 0 and ``-inf``.

    Raises:
        ConfigError: shapes, dtypes or the layout do not fit.
    """
    require_scale(softmax_scale)
    fix = "flatten [s, b, H, D] to [s * b, H, D]"
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix=fix)
    fix = "repeat the heads of grouped queries' keys"
    require_tensor("k", k, tuple(q.shape), (q.dtype,), q, fix)
    require_tensor("v", v, (*q.shape[:2], "Dv"), (q.dtype,), q, fix)
    require_layout(layout, {"q": q, "k": k}, {})
    shard = token_shard(layout)
    arguments = (q, k, v, shard, group, softmax_scale)
    call, budget = describe_dense_call(q, v.shape[2], shard.packed), policy.workspace_bytes
    return DENSE_ATTENTION.run(call, policy, attention.ring_attention, budget, *arguments)


def gathered_latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    layout: Layout,
    *,
    softmax_scale: float,
    latent_grad: torch.Tensor | None = None,
    policy: Policy = Policy(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`dense_attention` on gathered MLA latents, without communication.

    Head ``h`` has keys ``[latents[:, :R] @ w_uk[h].T, latents[:, R:]]`` and values ``latents[:, :R]
    @ w_uv[h].T``, which are expanded for one rank's tokens at a time.

    Args:
        q: ``[tokens, H, D]``, local queries with rope applied.
        latents: ``[cp * tokens, R + P]``, normalised latents of all context-parallel ranks in
            order, then ``P`` dims with rope applied.
        w_uk: ``[H, D - P, R]``, local heads; its gradient includes only local queries.
        w_uv: ``[H, Dv, R]``, likewise.
        layout: layout of the local tokens, sharded over context-parallel ranks.
        latent_grad: fp32 (fp64) ``[cp * tokens, R + P]``; gets the unrounded gradient instead of
            ``latents``.
    """
    require_scale(softmax_scale)
    fix = "flatten [s, b, H, D] to [s * b, H, D]"
    require_tensor("q", q, ("tokens", "H", "D"), FLOATS, fix=fix)
    require_layout(layout, {"q": q}, {})
    shard = token_shard(layout)
    keys, fix = shard.cp * len(q), "gather the latents of all ranks"
    require_tensor("latents", latents, (keys, "R + P"), (q.dtype,), q, fix)
    fix = "split the weight of linear_kv_up_proj by heads, and there into keys and values"
    require_tensor("w_uv", w_uv, (q.shape[1], "Dv", "R"), (q.dtype,), q, fix)
    rank = w_uv.shape[2]
    nope = q.shape[2] - (latents.shape[1] - rank)
    require_tensor("w_uk", w_uk, (q.shape[1], nope, rank), (q.dtype,), q, fix)
    if latent_grad is not None:
        fix = "pass the proxy that finish_with_proxy (layers/parallel/gather.py) returned"
        wide = accumulation_dtype(q.dtype)
        require_tensor("latent_grad", latent_grad, tuple(latents.shape), (wide,), q, fix)
    call = describe_dense_call(q, w_uv.shape[1], shard.packed)
    return DENSE_ATTENTION.run(call, policy, attention.gathered_latent_attention,
        policy.workspace_bytes, q, latents, w_uk, w_uv, shard, softmax_scale,
        latent_grad=latent_grad,
    )  # fmt: skip


def token_shard(layout: Layout) -> TokenShard:
    """Return the tokens of a context-parallel rank, including all its tensor-parallel ranks."""
    if layout.sequences is None:
        raise ConfigError(
            "layout must be one of sequences, got ranges of slots: make it with bshd_layout, "
            "packed_layout or layout_from_megatron."
        )
    return layout.derive("ring", lambda: _shard(layout))


def _shard(layout: Layout) -> TokenShard:
    sequences, count = layout.sequences, layout.num_queries
    assert sequences is not None
    keys = layout.key_ownership
    sharding = Sharding() if keys is None else keys.sharding.whole()
    cp, rank = sharding.cp, sharding.cp_rank
    if layout.num_keys != cp * count:
        raise ConfigError(
            f"layout must have as many keys as query tokens, {cp * count} on {cp} ranks, got "
            f"{layout.num_keys}: make both for the same batch."
        )
    if sequences.cu_seqlens is None:
        kind = ContiguousShard if sharding.cp_layout == "contiguous" else ZigzagShard
        return kind(cp, rank, sequences.batch, count // sequences.batch)
    lengths: dict[str, Any] = {
        "cu_seqlens": sequences.cu_seqlens,
        "cu_seqlens_padded": sequences.cu_seqlens_padded,
    }
    if sharding.cp_layout == "zigzag" and cp > 1:
        longest = max(padded_bound(layout), 1)
        return PackedZigzagShard(cp, rank, count, max_seqlen=longest, **lengths)
    runs = (dataclasses.replace(sharding, cp_rank=r).chunks(count * cp) for r in range(cp))
    longest = max(layout.max_length, 1)
    return PackedRuns(cp, rank, count, max_seqlen=longest, runs=tuple(map(tuple, runs)), **lengths)
