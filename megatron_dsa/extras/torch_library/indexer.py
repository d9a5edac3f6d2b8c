"""Top-k selection and indexer losses as registered operations."""

from typing import Any

import torch
from torch import Tensor

from megatron_dsa.errors import require
from megatron_dsa.extras.torch_library.registration import (
    TokenCounts,
    check_lengths,
    check_ratio,
    derivatives,
    empty_like,
    index_layout,
    layout_of,
    like,
    none_of,
    policy_of,
    policy_text,
    register_backward,
    registered,
)
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_lists, require_tensor
from megatron_dsa.ops.common.scaling import scaled_together
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss import api as losses
from megatron_dsa.ops.indexer_loss.spec import ExpandedKeys, LatentKeys, TeacherKeys
from megatron_dsa.ops.indexer_topk import api as selection
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, check_indexer
from megatron_dsa.ops.layout.layout import bshd_layout


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    ratio: int = 1,
    relu: bool = True,
    policy: Policy = Policy(),
) -> tuple[Tensor, Tensor]:
    """Select keys, see :func:`megatron_dsa.dsa_kernels.indexer_topk`.

    Args:
        q, k, weights, relu: see :class:`~megatron_dsa.dsa_kernels.IndexerInputs`; not
            differentiable.
        topk: keys per query, at least 1.
        cu_seqlens, max_seqlen, cu_seqlens_padded: lengths of packed sequences, see
            :func:`~megatron_dsa.ops.layout.layout.packed_layout`; without them all tokens are one
            causal sequence.
        ratio: positions per compressed key (DeepSeek-V4): ``k`` has ``tokens // ratio`` keys,
            indexed like :func:`compress`; 1: a key per token.
        policy: which implementations may run.

    Returns:
        ``indices`` int32 ``[Sq, topk]`` and ``length`` int32 ``[Sq]``.
    """
    return _topk(
        q, k, weights, topk, cu_seqlens, cu_seqlens_padded, max_seqlen, ratio, relu,
        policy_text(policy),
    )  # fmt: skip


def _fake_selection(a):
    inputs = IndexerInputs(a.q, a.k, a.weights, a.relu)
    _check(inputs, (a.cu_seqlens, a.cu_seqlens_padded, a.max_seqlen), a.ratio)
    require(a.topk >= 1, f"topk must be at least 1, got {a.topk}")
    shapes = (a.q.shape[0], a.topk), a.q.shape[:1]
    return tuple(a.q.new_empty(shape, dtype=torch.int32) for shape in shapes)


@registered("indexer_topk", _fake_selection)
def _topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None, max_seqlen: int | None = None, ratio: int = 1,
    relu: bool = True, policy: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout = layout_of(q.shape[0], q.device, cu_seqlens, cu_seqlens_padded, max_seqlen)
    indices, length = selection.indexer_topk(
        IndexerInputs(q, k, weights, relu), index_layout(layout, ratio), topk,
        policy=policy_of(policy),
    )  # fmt: skip
    return indices, length.clone()  # the layout caches ``length``


def _check(inputs: IndexerInputs, lengths: tuple[Any, ...], ratio: int, **queries: Tensor) -> None:
    check_lengths(*lengths)
    check_ratio(ratio)
    q = inputs.q
    require_tensor("inputs.q", q, ("Sq", "HI", "DI"), FLOATS, fix="flatten sequence and batch")
    counts: Any = TokenCounts(q.shape[0], q.shape[0] // ratio, q)
    check_indexer(inputs, counts, **queries)


def sparse_indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    teacher: Tensor,
    *,
    topk_length: Tensor | None = None,
    relu: bool = True,
    policy: Policy = Policy(),
) -> Tensor:
    """Compute the loss of :func:`megatron_dsa.dsa_kernels.sparse_indexer_loss`.

    Args:
        q, k, weights, relu: see :class:`~megatron_dsa.dsa_kernels.IndexerInputs`.
        indices, topk_length: results of :func:`indexer_topk`; they replace a layout.
        teacher: ``p_sum`` of :func:`sparse_attention` or :func:`masked_attention`, finite, not
            negative, summed over ranks that shard heads. Not differentiable.
        policy: which implementations may run.

    Returns:
        fp32 scalar, differentiable in q, k and weights; the forward also computes their gradients.
    """
    wanted = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or weights.requires_grad
    )
    return _sparse_loss(
        q, k, weights, indices, teacher.detach(), topk_length, relu, wanted, policy_text(policy)
    )[0]


def _fake_sparse_loss(a):
    _check_sparse(a.q, a.k, a.weights, a.indices, a.teacher, a.topk_length, a.relu)
    value = a.q.new_empty((), dtype=accumulation_dtype(a.q.dtype))
    return value, *map(empty_like if a.with_gradients else none_of, (a.q, a.k, a.weights))


@registered("sparse_indexer_loss", _fake_sparse_loss)
def _sparse_loss(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, teacher: Tensor,
    topk_length: Tensor | None = None, relu: bool = True, with_gradients: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_sparse(q, k, weights, indices, teacher, topk_length, relu)
    teacher = losses.checked_teacher(teacher, accumulation_dtype(q.dtype))
    layout = bshd_layout(q.shape[0], 1, q.device)
    value, gradients = losses.selected_keys_loss(
        IndexerInputs(q, k, weights, relu), layout, indices, topk_length, teacher,
        policy_of(policy), want_gradients=with_gradients,
    )  # fmt: skip
    if gradients is None:
        return value, none_of(q), none_of(k), none_of(weights)
    dq, dk, dweights = (g.to(x.dtype) for g, x in zip(gradients, (q, k, weights), strict=True))
    return value, dq, dk, dweights


def _check_sparse(q, k, weights, indices, teacher, topk_length, relu) -> None:
    require_tensor("inputs.q", q, ("Sq", "HI", "DI"), FLOATS, fix="flatten sequence and batch")
    keys = k.shape[0] if k.dim() else 0
    counts: Any = TokenCounts(q.shape[0], keys, q)
    check_indexer(IndexerInputs(q, k, weights, relu), counts)
    require_lists(indices, q, topk_length)
    fix = "give one entry per entry of indices"
    require_tensor("teacher", teacher, tuple(indices.shape), FLOATS, q, fix)


def dense_indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    k: TeacherKeys,
    *,
    softmax_scale: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    ratio: int = 1,
    relu: bool = True,
    other_lse: Tensor | None = None,
    lse: Tensor | None = None,
    policy: Policy = Policy(),
) -> Tensor:
    """Compute the loss of :func:`megatron_dsa.dsa_kernels.dense_indexer_loss`.

    Args:
        q_index, k_index, weights, relu: see :class:`~megatron_dsa.dsa_kernels.IndexerInputs`.
        q, k, softmax_scale, other_lse, lse: of the teacher's attention; not differentiable.
        cu_seqlens, max_seqlen, cu_seqlens_padded, ratio, policy: see :func:`indexer_topk`.

    Returns:
        fp32 scalar, differentiable in the indexer's tensors; the forward also computes their
            gradients.
    """
    wanted = torch.is_grad_enabled() and (
        q_index.requires_grad or k_index.requires_grad or weights.requires_grad
    )
    keys, w_uk, k_pe, v_dim = k, None, None, 0
    if isinstance(k, LatentKeys):
        keys, w_uk = k.latents, k.w_uk.detach()
    elif isinstance(k, ExpandedKeys):
        keys, k_pe, v_dim = k.kv, k.k_pe.detach(), k.v_dim
    return _dense_loss(
        q_index, k_index, weights, q.detach(), keys.detach(), w_uk, k_pe,
        None if other_lse is None else other_lse.detach(), None if lse is None else lse.detach(),
        cu_seqlens, cu_seqlens_padded, softmax_scale, v_dim, max_seqlen, ratio, relu, wanted,
        policy_text(policy),
    )[0]  # fmt: skip


def _fake_dense_loss(a):
    require_tensor("q", a.q, ("Sq", "H", "D"), FLOATS, a.q_index, "flatten sequence and batch")
    inputs = IndexerInputs(a.q_index, a.k_index, a.weights, a.relu)
    _check(inputs, (a.cu_seqlens, a.cu_seqlens_padded, a.max_seqlen), a.ratio, q=a.q)
    value = a.q.new_empty((), dtype=accumulation_dtype(a.q_index.dtype))
    tensors = a.q_index, a.k_index, a.weights
    if not a.with_gradients:
        return value, *map(none_of, tensors)
    return value, *(empty_like(_wide(x, a.q_index)) for x in tensors)


@registered("dense_indexer_loss", _fake_dense_loss)
def _dense_loss(
    q_index: Tensor, k_index: Tensor, weights: Tensor, q: Tensor, k: Tensor, w_uk: Tensor | None,
    k_pe: Tensor | None, other_lse: Tensor | None, lse: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None, softmax_scale: float, v_dim: int = 0,
    max_seqlen: int | None = None, ratio: int = 1, relu: bool = True, with_gradients: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    layout = layout_of(q_index.shape[0], q.device, cu_seqlens, cu_seqlens_padded, max_seqlen)
    layout = index_layout(layout, ratio)
    keys = _teacher_keys(k, w_uk, k_pe, v_dim)

    def loss(q_index: Tensor, k_index: Tensor, weights: Tensor) -> list[Tensor]:
        inputs = IndexerInputs(q_index, k_index, weights, relu)
        value = losses.dense_indexer_loss(
            inputs, q, keys, layout, softmax_scale=softmax_scale, other_lse=other_lse, lse=lse,
            policy=policy_of(policy),
        )  # fmt: skip
        return [value]

    tensors = tuple(_wide(x, q_index) for x in (q_index, k_index, weights))
    if not with_gradients:
        dq, dk, dweights = map(none_of, (q_index, k_index, weights))
        return loss(*(x.detach() for x in tensors))[0], dq, dk, dweights
    (value,), (dq, dk, dweights) = derivatives(loss, tensors)
    return value, dq, dk, dweights


def _wide(x: Tensor, q_index: Tensor) -> Tensor:
    """Widen fp16 to fp32: gradients are computed before the loss scale applies."""
    return x.float() if q_index.dtype == torch.float16 else x


def _teacher_keys(k, w_uk, k_pe, v_dim: int) -> TeacherKeys:
    if w_uk is not None:
        return LatentKeys(k, w_uk)
    return k if k_pe is None else ExpandedKeys(k, k_pe, v_dim)


@registered("scaled_gradients", like("dq", "dk", "dweights"))
def _scaled(
    dloss: Tensor, dq: Tensor, dk: Tensor, dweights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = dq, dk, dweights
    dq, dk, dweights = scaled_together(gradients, dloss, [g.dtype for g in gradients])
    return dq, dk, dweights


def _backward(dloss, dq, dk, dweights, with_gradients):
    require(
        with_gradients,
        "with_gradients must be True for a backward of the loss, got False: call the function of "
        "this name in megatron_dsa.extras.torch_library, which sets it",
    )
    return _scaled(dloss, dq, dk, dweights)


_RESULTS = ("loss", "dq", "dk", "dweights")
register_backward(
    "sparse_indexer_loss", _sparse_loss, _backward, of=("q", "k", "weights"), results=_RESULTS
)
register_backward(
    "dense_indexer_loss", _dense_loss, _backward, of=("q_index", "k_index", "weights"),
    results=_RESULTS,
)  # fmt: skip
