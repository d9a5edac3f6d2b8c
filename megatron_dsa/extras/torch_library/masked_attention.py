"""Masked dense attention as a registered operation, with its bit masks."""

import torch
from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    check_lengths,
    layout_of,
    none_of,
    policy_of,
    policy_text,
    register_backward,
    registered,
)
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.masked_attention import api
from megatron_dsa.ops.masked_attention.api import MaskedAttentionOutput
from megatron_dsa.ops.masked_attention.spec import WORDS, MaskedAttentionInputs, groups


def key_bits(
    indices: Tensor, topk_length: Tensor | None, num_keys: int, *, policy: Policy = Policy()
) -> Tensor:
    """Return the bits of listed keys, see :func:`megatron_dsa.dsa_kernels.key_bits`."""
    return _key_bits(indices, topk_length, num_keys, policy_text(policy))


def _fake_key_bits(a):
    api.check_lists(a.indices, a.topk_length, a.num_keys)
    return a.indices.new_empty(a.indices.shape[0], groups(a.num_keys), WORDS)


@registered("key_bits", _fake_key_bits)
def _key_bits(
    indices: Tensor, topk_length: Tensor | None, num_keys: int, policy: str = ""
) -> Tensor:
    return api.key_bits(indices, topk_length, num_keys, policy=policy_of(policy))


def visible_bits(
    tokens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    policy: Policy = Policy(),
) -> Tensor:
    """Return the bits of each query's visible keys, see
    :func:`megatron_dsa.dsa_kernels.visible_bits`.

    Args:
        tokens: ``[Sq, ...]``, only its length and device are used.
        cu_seqlens, max_seqlen, cu_seqlens_padded, policy: see :func:`indexer_topk`.
    """
    return _visible_bits(tokens, cu_seqlens, cu_seqlens_padded, max_seqlen, policy_text(policy))


def _fake_visible_bits(a):
    check_lengths(a.cu_seqlens, a.cu_seqlens_padded, a.max_seqlen)
    count = a.tokens.shape[0]
    return a.tokens.new_empty(count, groups(count), WORDS, dtype=torch.int32)


@registered("visible_bits", _fake_visible_bits)
def _visible_bits(
    tokens: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
    max_seqlen: int | None = None, policy: str = "",
) -> Tensor:  # fmt: skip
    layout = layout_of(tokens.shape[0], tokens.device, cu_seqlens, cu_seqlens_padded, max_seqlen)
    bits = api.visible_bits(layout, policy_of(policy))
    # Copy: the layout caches its bits.
    return bits.clone() if cu_seqlens is None else bits


def masked_attention(
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    bits: Tensor,
    *,
    softmax_scale: float,
    topk: int | None = None,
    want_p_sum: bool = False,
    policy: Policy = Policy(),
) -> MaskedAttentionOutput:
    """Compute attention; see :func:`megatron_dsa.dsa_kernels.masked_attention`.

    :func:`sparse_indexer_loss` trains the indexer on ``p_sum``, separately from this backward.
    """
    out, lse, p_sum = _attend(
        q, kv, k_pe, bits, softmax_scale, topk, want_p_sum, policy_text(policy)
    )
    return MaskedAttentionOutput(out, lse, p_sum if want_p_sum else None)


def _fake_attention(a):
    api.check_queries_and_keys(a.q, a.kv, a.k_pe)
    api.check_bits(a.bits, a.q, a.kv, a.q.shape[0])
    api.check_topk(a.topk, a.want_p_sum)
    lse = a.q.new_empty(a.q.shape[:2], dtype=accumulation_dtype(a.q.dtype))
    p_sum = lse.new_empty(a.q.shape[0], a.topk) if a.want_p_sum else none_of(lse)
    v_dim = a.kv.shape[2] - a.q.shape[2] + a.k_pe.shape[1]
    return a.q.new_empty(*a.q.shape[:2], v_dim), lse, p_sum


@registered("masked_attention", _fake_attention)
def _attend(
    q: Tensor, kv: Tensor, k_pe: Tensor, bits: Tensor, softmax_scale: float,
    topk: int | None = None, want_p_sum: bool = False, policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, p_sum = api.masked_attention(
        q, kv, k_pe, bits, softmax_scale=softmax_scale, topk=topk, want_p_sum=want_p_sum,
        policy=policy_of(policy),
    )  # fmt: skip
    return out, lse, none_of(lse) if p_sum is None else p_sum


@registered("masked_attention_backward")
def _backward(
    dout: Tensor, q: Tensor, kv: Tensor, k_pe: Tensor, bits: Tensor, out: Tensor, lse: Tensor,
    softmax_scale: float, topk: int | None = None, policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    asked = policy_of(policy)
    inputs = MaskedAttentionInputs(
        q, kv, k_pe, bits.contiguous(), out.shape[2], softmax_scale, asked.workspace_bytes
    )
    call = api.describe_attention(q, kv, k_pe, topk)
    dq, dkv, dk_pe = api.BACKWARD.run(call, asked, inputs, out, lse, dout.contiguous())
    return dq, dkv, dk_pe.to(k_pe.dtype)


register_backward(
    "masked_attention", _attend, _backward, of=("q", "kv", "k_pe"), results=("out", "lse")
)
