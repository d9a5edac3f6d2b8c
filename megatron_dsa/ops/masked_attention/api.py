"""Masked dense attention as one differentiable function.

What is saved is ``q, kv, k_pe, out, lse`` and the index lists: the bits are formed from the lists
again in the backward, as the probabilities are. Ranks that share tokens gather them again, too:
kept, they would take an eighth of a byte per query and key in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dsa.dispatch import OpCall, Policy, describe_call
from megatron_dsa.errors import require
from megatron_dsa.numerics.arithmetic import (
    accumulation_dtype,
    rows_in_budget,
    slices,
    valid_entries,
)
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.numerics.checks import FLOATS, require_lists, require_tensor
from megatron_dsa.ops.indexer_loss.api import IndexerTraining, separate_tensors
from megatron_dsa.ops.masked_attention.declaration import (
    BACKWARD,
    FORWARD,
    KEY_BITS,
    PROBABILITIES,
)
from megatron_dsa.ops.masked_attention.exchange import gather_tokens, sum_own_tokens
from megatron_dsa.ops.masked_attention.inputs import KeyBitsInputs, MaskedAttentionInputs


class MaskedAttentionOutput(NamedTuple):
    """What :func:`masked_attention` returns."""

    #: ``[Sq, H, Dv]`` in q's dtype; 0 for tokens that select nothing.
    out: torch.Tensor
    #: ``[Sq, H]`` fp32 (fp64 for fp64), natural log over the selected keys, ``-inf`` if none.
    lse: torch.Tensor
    #: As ``indices``, in the dtype of ``lse``: sum over all heads of the group (those of ``q``
    #: without one) of the probabilities of the listed keys, 0 at invalid entries; ``None`` unless
    #: it was asked for.
    p_sum: torch.Tensor | None


@dataclass(frozen=True)
class _Settings:
    """What takes no part in autograd and holds no tensor."""

    softmax_scale: float
    policy: Policy
    call: OpCall
    want_p_sum: bool
    in_order: bool
    indexer: IndexerTraining | None  # without its tensors
    group: Any

    def inputs(self, q, kv, k_pe, indices, length) -> MaskedAttentionInputs:
        """Put the tensors of a call together, the bits of its lists among them."""
        workspace = self.policy.workspace_bytes
        lists = KeyBitsInputs(indices, length, kv.shape[0], workspace)
        bits = gather_tokens(KEY_BITS.run(self.call, self.policy, lists), self.group)
        v_dim = self.call.v_dim
        return MaskedAttentionInputs(q, kv, k_pe, bits, v_dim, self.softmax_scale, workspace)

    def p_sum(self, inputs: MaskedAttentionInputs, lse, indices, length) -> torch.Tensor:
        """Return the head sum of the probabilities at the entries of the lists, like these."""
        width = indices.shape[1]
        p_sum = PROBABILITIES.run(self.call, self.policy, inputs, lse, width)
        p_sum = sum_own_tokens(p_sum, self.group)
        if not self.in_order:
            _to_list_order(p_sum, indices, length, inputs)
        return p_sum


def _to_list_order(
    p_sum: torch.Tensor,
    indices: torch.Tensor,
    length: torch.Tensor | None,
    inputs: MaskedAttentionInputs,
) -> None:
    """Move ``p_sum [Sq, K]`` from the ascending order of the keys to that of the lists."""
    num_keys = len(inputs.kv)
    # Per entry: validity, a masked and a sorted copy, the int64 order, and two sums.
    tokens_at_once = rows_in_budget(inputs.workspace_bytes, indices.shape[1] * 40)
    for tokens in slices(len(indices), tokens_at_once):
        part = None if length is None else length[tokens]
        valid = valid_entries(indices[tokens], part, num_keys)
        order = torch.where(valid, indices[tokens], num_keys).argsort(dim=1)
        p_sum[tokens] = torch.zeros_like(p_sum[tokens]).scatter_(1, order, p_sum[tokens])


class _MaskedAttention(torch.autograd.Function):
    """``q, kv, k_pe, index q, k, weights, ... -> out, lse, p_sum``."""

    @staticmethod
    def forward(ctx, q, kv, k_pe, index_q, index_k, index_weights, indices, length, s, k_pe_grad):
        inputs = s.inputs(q, kv, k_pe, indices, length)
        out, lse = FORWARD.run(s.call, s.policy, inputs)
        p_sum = s.p_sum(inputs, lse, indices, length) if s.want_p_sum else None
        ctx.save_for_backward(
            q, kv, k_pe, index_q, index_k, index_weights, indices, length, out, lse
        )
        ctx.settings = s
        ctx.separate_k_pe_grad = k_pe_grad is not None
        ctx.mark_non_differentiable(*(x for x in (lse, p_sum) if x is not None))
        return out, lse, p_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse, _dp_sum):
        """Return all gradients; the sparse indexer loss exists in here only."""
        s: _Settings = ctx.settings
        q, kv, k_pe, *index_tensors, indices, length, out, lse = ctx.saved_tensors
        inputs = s.inputs(q, kv, k_pe, indices, length)
        dq, dkv, dk_pe = BACKWARD.run(s.call, s.policy, inputs, out, lse, dout.contiguous())
        index_grads: tuple[torch.Tensor | None, ...] = (None,) * 3
        if s.indexer is not None and any(ctx.needs_input_grad[3:6]):
            teacher = s.p_sum(inputs, lse, indices, length)
            del inputs  # and its bits, before the loss takes memory
            index_grads = s.indexer.gradients(index_tensors, indices, length, teacher, s.policy)
        separate = ctx.separate_k_pe_grad
        to_k_pe, to_proxy = (None, dk_pe) if separate else (dk_pe.to(k_pe.dtype), None)
        return dq, dkv, to_k_pe, *index_grads, None, None, None, to_proxy


def masked_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    k_pe_grad: torch.Tensor | None = None,
    want_p_sum: bool = False,
    in_order: bool = False,
    indexer: IndexerTraining | None = None,
    group: Any = None,
    policy: Policy = Policy(),
) -> MaskedAttentionOutput:
    """Attend from every query token to its own list of keys, by plain MLA under a bit mask.

    The result is that of :func:`sparse_attention` on absorbed queries and latent keys. Every key is
    read, whether it is selected or not, with fewer dims than a latent: the fewer keys there are
    besides those selected, the better.

    Ranks that attend for the same tokens with different heads may each give the lists of some of
    the tokens: with ``group``, bits are gathered over it, and head sums are summed over it and go
    to the rank whose lists they belong to.

    Args:
        q: ``[Sq, H, Dn + R]``, bf16, fp16, fp32 or fp64; the dims without rope first.
        kv: ``[Skv, H, Dn + Dv]``, same dtype: per head the key without rope, then the value. It
            must be finite, keys that no query selects included.
        k_pe: ``[Skv, R]``, same dtype: the rope key of all heads; finite, too.
        indices: int32 ``[Sq, K]``, key tokens; with ``group`` ``[Sq / ranks, K]``, of the tokens
            that are this rank's if all are divided evenly in the order of ranks. Entries ``< 0``
            or ``>= Skv`` select nothing. A key must not be listed twice for one query. Masking is
            by indices only.
        softmax_scale: factor on ``q . k`` before the softmax.
        topk_length: int32, one per list: entries of ``indices`` from there on are ignored.
        k_pe_grad: fp32 ``[Skv, R]``: if given, the gradient of ``k_pe`` is sent here, unrounded,
            instead of to ``k_pe`` (see :func:`megatron_dsa.parallel.gather.finish_gather`).
        want_p_sum: also return the head sum of the probabilities (the indexer's teacher).
        in_order: the caller knows that all lists are ascending, with invalid entries at the end
            only: spares the head sum from sorting them.
        indexer: train the indexer on these probabilities in the backward pass (see
            :class:`~megatron_dsa.ops.indexer_loss.api.IndexerTraining`), whose query tokens are
            those of ``indices``.
        group: process group of ranks that have the same tokens and other heads each. All of them
            call together, forward and backward, with the same ``K``.
        policy: which implementations may run.

    Returns:
        :class:`MaskedAttentionOutput`; ``out`` is differentiable in q, kv and k_pe.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or an ``indexer`` with a
            ``head_group`` beside ``group``.
    """
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    fix = "give it the H and dtype of q"
    require_tensor("kv", kv, ("Skv", q.shape[1], "Dn + Dv"), (q.dtype,), q, fix)
    fix = "give one rope key per token of kv"
    require_tensor("k_pe", k_pe, (kv.shape[0], "R"), (q.dtype,), q, fix)
    nope = q.shape[2] - k_pe.shape[1]
    require(
        0 < nope < kv.shape[2],
        f"q must have more than the {k_pe.shape[1]} dims of k_pe, and fewer beyond them than the "
        f"{kv.shape[2]} of kv (key and value), got {q.shape[2]}: give it those of a key with rope",
    )
    if k_pe_grad is not None:
        wanted = accumulation_dtype(k_pe.dtype)
        fix = "pass the rope dims of the proxy that megatron_dsa.parallel.gather.finish_gather made"
        require_tensor("k_pe_grad", k_pe_grad, tuple(k_pe.shape), (wanted,), q, fix)
    require_lists(indices, _with_lists(q, indexer, group), topk_length)
    call = describe_call(
        q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        qk_dim=q.shape[2],
        v_dim=kv.shape[2] - nope,
        rope_dim=k_pe.shape[1],
        topk=indices.shape[1],
    )
    indexer, trained = separate_tensors(indexer, indices=indices)
    settings = _Settings(softmax_scale, policy, call, want_p_sum, in_order, indexer, group)
    return MaskedAttentionOutput(
        *_MaskedAttention.apply(q, kv, k_pe, *trained, indices, topk_length, settings, k_pe_grad)
    )


def _with_lists(q: torch.Tensor, indexer: IndexerTraining | None, group: Any) -> torch.Tensor:
    """Return the queries that this rank has lists for, after the checks of ``group``."""
    if group is None:
        return q
    own, rest = divmod(len(q), group.size())
    require(
        rest == 0,
        f"q must have equally many tokens for each of the {group.size()} ranks of group, got "
        f"{len(q)}: pad the sequences",
    )
    require(
        indexer is None or indexer.head_group is None,
        "indexer.head_group must be None with group, over which head sums are summed already: "
        "drop it",
    )
    return q.narrow(0, group.rank() * own, own)
