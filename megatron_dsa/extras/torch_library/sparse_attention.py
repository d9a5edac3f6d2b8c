"""Sparse attention as a registered operation (:mod:`megatron_dsa.ops.sparse_attention.api`)."""

from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    none_of,
    policy_of,
    policy_text,
    register_backward,
    registered,
)
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.sparse_attention import api
from megatron_dsa.ops.sparse_attention.api import SparseAttentionOutput


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    v_dim: int,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    want_p_sum: bool = False,
    in_order: bool = False,
    policy: Policy = Policy(),
) -> SparseAttentionOutput:
    """Compute attention; see :func:`megatron_dsa.dsa_kernels.sparse_attention`.

    :func:`sparse_indexer_loss` trains the indexer on ``p_sum``, separately from this backward.
    """
    out, lse, p_sum = _attend(
        q, kv, indices, topk_length, attn_sink, softmax_scale, v_dim, want_p_sum, in_order,
        policy_text(policy),
    )  # fmt: skip
    return SparseAttentionOutput(out, lse, p_sum if want_p_sum else None)


@registered("sparse_attention")
def _attend(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, attn_sink: Tensor | None,
    softmax_scale: float, v_dim: int, want_p_sum: bool = False, in_order: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, p_sum = api.sparse_attention(
        q, kv, indices, softmax_scale=softmax_scale, v_dim=v_dim, topk_length=topk_length,
        attn_sink=attn_sink, want_p_sum=want_p_sum, in_order=in_order, policy=policy_of(policy),
    )  # fmt: skip
    return out, lse, none_of(lse) if p_sum is None else p_sum


@registered("sparse_attention_backward")
def _backward(
    dout: Tensor, q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None,
    attn_sink: Tensor | None, out: Tensor, lse: Tensor, softmax_scale: float,
    in_order: bool = False, policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = api.describe_attention(q, out.shape[2], indices.shape[1], attn_sink)
    s = api.Settings(
        out.shape[2], softmax_scale, policy_of(policy), call, False, None, None, in_order
    )
    inputs = s.inputs(q, kv, attn_sink, indices, topk_length, False)
    dq, dkv, dsink, _ = s.run(api.BACKWARD, inputs, out, lse, dout.contiguous())
    dsink = none_of(lse) if attn_sink is None else dsink.to(attn_sink.dtype)
    return dq, dkv.to(kv.dtype), dsink


register_backward(
    "sparse_attention", _attend, _backward, of=("q", "kv", "attn_sink"), results=("out", "lse")
)
