"""V4's compressor as a registered operation (:mod:`megatron_dsa.ops.compressor.api`)."""

import torch
from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    check_lengths,
    derivatives,
    layout_of,
    like,
    policy_of,
    policy_text,
    register_backward,
    registered,
)
from megatron_dsa.ops.compressor import api
from megatron_dsa.ops.compressor.api import CompressorInputs
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.compressed import Groups, compressed_keys


def compress(
    values: Tensor,
    scores: Tensor,
    ape: Tensor,
    *,
    overlap: bool,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    policy: Policy = Policy(),
) -> Tensor:
    """Pool groups of positions, see :func:`megatron_dsa.ops.compressor.api.compress`.

    Args:
        values, scores: ``[tokens, c * d]``; ``c`` is 2 with overlap, else 1.
        ape: ``[ratio, c * d]``, ratio at least 2.
        overlap: a group also pools the positions of the previous group.
        cu_seqlens, max_seqlen, cu_seqlens_padded, policy: see :func:`indexer_topk`.

    Returns:
        ``[tokens // ratio, d]``: group ``g`` of the sequence that starts at token ``o`` is at index
            ``o // ratio + g``; gaps are 0. Differentiable in values, scores and ape; the backward
            recomputes the forward.
    """
    return _compress(
        values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen,
        policy_text(policy),
    )  # fmt: skip


def _fake_keys(a):
    slots = _check(
        a.values, a.scores, a.ape, a.overlap, a.cu_seqlens, a.cu_seqlens_padded, a.max_seqlen
    )
    return a.values.new_empty(slots, a.values.shape[1] // (2 if a.overlap else 1))


@registered("compress", _fake_keys)
def _compress(
    values: Tensor, scores: Tensor, ape: Tensor, overlap: bool, cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None, max_seqlen: int | None = None, policy: str = "",
) -> Tensor:  # fmt: skip
    _check(values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen)
    keys = _keys(values, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen)
    return api.compress(values, scores, ape, keys, overlap=overlap, policy=policy_of(policy))


def _keys(values, ape, overlap, *lengths):
    layout = layout_of(values.shape[0], values.device, *lengths)
    return compressed_keys(layout, ape.shape[0], overlap)


def _check(values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen) -> int:
    check_lengths(cu_seqlens, cu_seqlens_padded, max_seqlen)
    ratio = ape.shape[0] if ape.dim() else 0
    # Check all arguments except the groups, which do not exist yet.
    none = values.new_empty(0, dtype=torch.int32)
    CompressorInputs(values, scores, ape, Groups(none, none, 1), ratio, overlap, 0).check()
    return values.shape[0] // ratio


_DIFFERENTIABLE = ("values", "scores", "ape")


def _fake_gradients(a):
    _fake_keys(a)
    return like(*_DIFFERENTIABLE)(a)


@registered("compress_backward", _fake_gradients)
def _backward(
    dpooled: Tensor, values: Tensor, scores: Tensor, ape: Tensor, cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None, overlap: bool, max_seqlen: int | None = None,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys = _keys(values, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen)
    asked = policy_of(policy)

    def run(values: Tensor, scores: Tensor, ape: Tensor) -> list[Tensor]:
        return [api.compress(values, scores, ape, keys, overlap=overlap, policy=asked)]

    dvalues, dscores, dape = derivatives(run, (values, scores, ape), [dpooled])[1]
    return dvalues, dscores, dape


register_backward("compress", _compress, _backward, of=_DIFFERENTIABLE)
