"""The public operations: sparse attention, index selection, indexer losses, dense attention.

Each function takes plain tensors on flattened rows (:mod:`megatron_dsa.sequence.layout` says which
rows belong together), picks an implementation (:mod:`megatron_dsa.dispatch`) and is differentiable
where that makes sense. They can be used without Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_dsa.dispatch import Policy, device_problem
from megatron_dsa.errors import require
from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.numerics.checks import FLOATS, require_layout, require_tensor, require_values
from megatron_dsa.ops.dense_attention.api import dense_attention
from megatron_dsa.ops.indexer_loss.api import IndexerTraining, SelectedKeysLoss, index_problem
from megatron_dsa.ops.indexer_loss.declaration import DENSE_LOSS
from megatron_dsa.ops.indexer_loss.inputs import DenseLossProblem, LatentKeys
from megatron_dsa.ops.indexer_topk.blocks import select_blocks
from megatron_dsa.ops.indexer_topk.finite import require_finite_scores
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs, TopKProblem
from megatron_dsa.ops.indexer_topk.select import selector
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.sparse_attention.api import Settings, SparseAttention
from megatron_dsa.parallel.ring.api import gathered_latent_attention, ring_attention
from megatron_dsa.sequence.layout import Layout

__all__ = [
    "IndexerInputs",
    "IndexerTraining",
    "LatentKeys",
    "SparseAttentionOutput",
    "dense_attention",
    "ring_attention",
    "gathered_latent_attention",
    "dense_indexer_loss",
    "indexer_topk",
    "sparse_attention",
    "sparse_indexer_loss",
]


class SparseAttentionOutput(NamedTuple):
    """What :func:`sparse_attention` returns."""

    #: ``[Sq, H, v_dim]`` in q's dtype; 0 for rows that select nothing.
    out: torch.Tensor
    #: ``[Sq, H]`` fp32, natural log over the selected keys (sink excluded), ``-inf`` if none.
    lse: torch.Tensor
    #: ``[Sq, K]`` fp32, sum over the local heads of the probabilities, 0 at invalid entries;
    #: ``None`` unless it was asked for.
    p_sum: torch.Tensor | None


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | KeyLists,
    *,
    softmax_scale: float,
    v_dim: int,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    kv_grad: torch.Tensor | None = None,
    want_p_sum: bool = False,
    in_order: bool = False,
    indexer: IndexerTraining | None = None,
    policy: Policy = Policy(),
) -> SparseAttentionOutput:
    """Attend from every query row to its own list of key rows (one key/value head).

    Args:
        q: ``[Sq, H, D]``, bf16, fp16, fp32 or fp64.
        kv: ``[Skv, D]``, same dtype; the value is its first ``v_dim`` columns, by construction of
            absorbed MLA. There is no separate value argument.
        indices: int32 ``[Sq, K]``, rows of ``kv``. Entries ``< 0`` or ``>= Skv`` select nothing.
            A row must not be listed twice for one query. Masking is by indices only. Or
            :class:`~megatron_dsa.ops.key_lists.api.KeyLists`, whose lists are written block by
            block.
        softmax_scale: factor on ``q . kv`` before the softmax.
        v_dim: number of leading columns of ``kv`` that are the value.
        topk_length: int32 ``[Sq]``: entries of ``indices`` from there on are ignored.
        attn_sink: fp32 ``[H]``: a logit per head in the denominator that has no value
            (DeepSeek-V4); ``out = out_keys * sigmoid(lse - sink)``.
        kv_grad: fp32 ``[Skv, D]``: if given, the gradient of ``kv`` is sent here, unrounded,
            instead of to ``kv`` (see :func:`megatron_dsa.parallel.gather.arrive`).
        want_p_sum: also return the head sum of the probabilities (the indexer's teacher).
        in_order: the caller knows that all lists follow one order of the keys, as those of
            :func:`indexer_topk` and of ``KeyLists`` do: spares a backward from sorting them.
        indexer: train the indexer on these probabilities in the backward pass, where they are
            recomputed anyway (see :class:`~megatron_dsa.ops.indexer_loss.api.IndexerTraining`).
        policy: which implementations may run.

    Returns:
        :class:`SparseAttentionOutput`; ``out`` is differentiable in q, kv and attn_sink.

    Raises:
        ConfigError: for shapes or dtypes outside of the above.
    """
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    require_tensor("kv", kv, ("Skv", q.shape[2]), (q.dtype,), q, "give it the D of q")
    lists = indices if isinstance(indices, KeyLists) else None
    if lists is not None:
        _check_lists(lists, q, kv, topk_length, want_p_sum or indexer is not None)
        width = lists.full_width
        indices, topk_length = lists.selected, lists.selected_length
        lists, in_order = replace(lists, selected=None, selected_length=None), True
    else:
        _check_indices(indices, q, topk_length)
        width = indices.shape[1]
    require(
        0 < v_dim <= kv.shape[1],
        f"v_dim must be in [1, {kv.shape[1]}] (the value is a slice of kv), got {v_dim}",
    )
    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, q.shape[1:2], FLOATS, q, "give one logit per head")
    if kv_grad is not None:
        wanted = accumulation_dtype(kv.dtype)
        fix = "pass the channel that megatron_dsa.parallel.gather.arrive returned"
        require_tensor("kv_grad", kv_grad, tuple(kv.shape), (wanted,), q, fix)
    problem = device_problem(
        q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        qk_dim=q.shape[2],
        v_dim=v_dim,
        topk=width,
        sink=attn_sink is not None,
    )
    if indexer is not None:
        _check_indexer(indexer.inputs, indexer.layout, q=q)
    trained = (None,) * 3
    if indexer is not None:
        trained = indexer.tensors()
        indexer = indexer.without_tensors()
    settings = Settings(v_dim, softmax_scale, policy, problem, want_p_sum, indexer, lists, in_order)
    return SparseAttentionOutput(
        *SparseAttention.apply(q, kv, kv_grad, attn_sink, *trained, indices, topk_length, settings)
    )


def _check_indices(indices: torch.Tensor, q: torch.Tensor, topk_length) -> None:
    shape = (q.shape[0], "K")
    require_tensor("indices", indices, shape, (torch.int32,), q, "give one list per query token")
    if topk_length is not None:
        fix = "give one length per query token"
        require_tensor("topk_length", topk_length, q.shape[:1], (torch.int32,), q, fix)


def _check_lists(lists: KeyLists, q, kv, topk_length, wants_teacher: bool) -> None:
    first = lists.offset
    # Where held is given, kv holds a part of all ranks' keys.
    keys = {} if lists.held is not None else {f"kv[{first}:]" if first else "kv": kv[first:]}
    require_layout(lists.layout, {"q": q}, keys)
    require(topk_length is None, "topk_length must be None: lists have their own lengths")
    require(
        not wants_teacher or lists.selected is not None,
        "want_p_sum and indexer need lists with a selection: without one, use dense_indexer_loss",
    )
    if lists.selected is not None and lists.selected.numel() > 0:
        # A larger slot would be the row of another kind of key.
        rule = f"lists.selected must be compressed slots below {lists.offset}, or -1"
        fine = lists.selected.amax() < lists.offset
        require_values({f"{rule}: select with lists.compressed.layout": fine}, rule)


def _check_indexer(inputs: IndexerInputs, layout: Layout, **queries: torch.Tensor) -> None:
    """Raise unless the indexer's tensors, the layout and what has its query tokens fit."""
    q, k, weights = inputs.q, inputs.k, inputs.weights
    fix = "flatten sequence and batch to tokens"
    require_tensor("inputs.q", q, ("Sq", "HI", "DI"), FLOATS, fix=fix)
    require_tensor("inputs.k", k, ("Skv", q.shape[2]), (q.dtype,), q, "give it the DI of inputs.q")
    fix = "give one weight per query token and index head"
    require_tensor("inputs.weights", weights, tuple(q.shape[:2]), FLOATS, q, fix)
    require(inputs.key_scales is None, "inputs.key_scales must be None: they belong to fp8 keys")
    require_layout(layout, {"inputs.q": q} | queries, {"inputs.k": k})


def indexer_topk(
    inputs: IndexerInputs, layout: Layout, topk: int, *, policy: Policy = Policy()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``min(topk, visible)`` best visible keys of every query row.

    Scores are ``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` in fp32. The selection is exact
    and deterministic; equal scores go to the key that comes first in its sequence. With
    ``policy.fp8_selection`` a key that fp8 scores put far behind may be missed
    (:class:`megatron_dsa.ops.indexer_topk.select.Candidates`).

    Args:
        inputs: see :class:`IndexerInputs`.
        layout: which keys each query row sees.
        topk: keys per query, at least 1.
        policy: which implementations may run.

    Returns:
        ``indices`` int32 ``[Sq, topk]``: rows of the key buffer in sequence order, then ``-1``;
        ``length`` int32 ``[Sq]``: number of valid entries. Not differentiable.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, a layout of other tensors, or scores
            that are NaN or infinite; on a GPU the latter is a device assert, which ends the
            process at its next synchronisation.
    """
    _check_indexer(inputs, layout)
    require(topk >= 1, f"topk must be at least 1, got {topk}")
    inputs = require_finite_scores(inputs, layout, "indexer_topk")
    problem = TopKProblem(inputs.detach(), layout, topk)
    return select_blocks(problem, selector(problem, policy), policy.workspace_bytes)


def sparse_indexer_loss(
    inputs: IndexerInputs,
    indices: torch.Tensor,
    teacher: torch.Tensor,
    layout: Layout,
    *,
    topk_length: torch.Tensor | None = None,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Sum over query rows of ``KL(teacher || student)`` over the selected keys.

    Args:
        inputs: the indexer's tensors; the result is differentiable in q, k and weights.
        indices: int32 ``[Sq, K]``, rows of ``inputs.k``, as from :func:`indexer_topk`.
        teacher: ``[Sq, K]``: ``p_sum`` of :func:`sparse_attention`, summed over tensor-parallel
            ranks. Normalised here; no gradient flows to it.
        layout: the layout the selection was made with.
        topk_length: int32 ``[Sq]`` or ``None``.
        policy: which implementations may run.

    Returns:
        fp32 scalar. Divide by the number of real rows for the mean.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or a layout of other tensors.
    """
    _check_indexer(inputs, layout)
    _check_indices(indices, inputs.q, topk_length)
    fix = "give one entry per entry of indices"
    require_tensor("teacher", teacher, tuple(indices.shape), FLOATS, inputs.q, fix)
    teacher = teacher.detach().to(accumulation_dtype(inputs.q.dtype), copy=True)
    loss = SelectedKeysLoss(layout, indices, topk_length, teacher, policy)
    return loss.differentiable(inputs)


def dense_indexer_loss(
    inputs: IndexerInputs,
    q: torch.Tensor,
    k: torch.Tensor | LatentKeys,
    layout: Layout,
    *,
    softmax_scale: float,
    other_lse: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_group=None,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Sum over query rows of ``KL(teacher || student)`` over all visible keys.

    Args:
        inputs: the indexer's tensors; the result is differentiable in q, k and weights.
        q: ``[Sq, H, D]`` and k ``[Skv, 1 or H, D]`` of the attention whose distribution is the
            teacher; absorbed (one key head) and plain MLA (``H``) give the same result. With
            :class:`LatentKeys` the keys of all heads never exist at once.
        layout: which keys each query row sees.
        softmax_scale: factor on ``q . k``, positive.
        other_lse: ``[Sq, H]``, log of the mass that the teacher's softmax has besides these keys
            (window and sink of hybrid attention), ``-inf`` for none.
        lse: ``[Sq, H]``, log-sum-exp (natural) of the scaled scores over the visible keys, as dense
            attention returns it: spares a pass over the teacher. ``None``: it is computed.
        head_group: process group that shares the heads; the teacher is summed over it.
        policy: which implementations may run.

    Returns:
        fp32 scalar. Divide by the number of real rows for the mean.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, a layout of other tensors, or scores
            that are NaN or infinite (on a GPU a device assert, as in :func:`indexer_topk`).
    """
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, inputs.q, "flatten sequence and batch")
    _check_indexer(inputs, layout, q=q)
    _check_teacher_keys(q, k, layout)
    require(softmax_scale > 0, f"softmax_scale must be positive, got {softmax_scale}")
    for name, value in (("other_lse", other_lse), ("lse", lse)):
        if value is not None:
            fix = "give one value per query token and head"
            require_tensor(name, value, tuple(q.shape[:2]), FLOATS, q, fix)
    inputs = require_finite_scores(inputs, layout, "dense_indexer_loss")
    arguments = DenseLossProblem(
        inputs, layout, q.detach(), k.detach(), softmax_scale, head_group, policy.workspace_bytes,
        None if other_lse is None else other_lse.detach(), None if lse is None else lse.detach(),
    )  # fmt: skip
    asked = index_problem(inputs, layout, None)
    # The teacher's queries may be wider than the indexer's.
    asked = replace(asked, dtype=torch.promote_types(asked.dtype, q.dtype))
    return DENSE_LOSS.run(asked, policy, arguments)


def _check_teacher_keys(q: torch.Tensor, k: torch.Tensor | LatentKeys, layout: Layout) -> None:
    heads, dim = q.shape[1:]
    if not isinstance(k, LatentKeys):
        shape = ("Skv", f"1 or {heads}", dim)
        require_tensor("k", k, shape, (q.dtype,), q, "give it the D of q")
        require(
            k.shape[1] in (1, heads),
            f"k must have 1 or {heads} heads, got {k.shape[1]}: repeat those that queries share",
        )
        require_layout(layout, {}, {"k": k})
        return
    latents, w_uk = k.latents, k.w_uk
    require(
        latents.dim() == 2 and w_uk.dim() == 3 and w_uk.shape[0] == heads
        and latents.shape[1] - w_uk.shape[2] == dim - w_uk.shape[1] >= 0,
        f"k must have latents [Skv, R + P] and w_uk [{heads}, {dim} - P, R], got shapes "
        f"{tuple(latents.shape)} and {tuple(w_uk.shape)}",
    )  # fmt: skip
    require(
        latents.dtype == w_uk.dtype == q.dtype,
        f"k must have latents and w_uk in q's dtype {q.dtype}, got {latents.dtype} and "
        f"{w_uk.dtype}: cast them",
    )
    require_layout(layout, {}, {"k.latents": latents})
