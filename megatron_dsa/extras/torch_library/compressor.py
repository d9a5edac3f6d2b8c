"""V4's compressor as a registered operation (:mod:`megatron_dsa.ops.compressor.api`)."""

import torch
from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    check_lengths,
    derivatives,
    empty_like,
    layout_of,
    policy_of,
    policy_text,
    registered,
)
from megatron_dsa.ops.common.autograd import once_differentiable
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
    """Pool groups of positions as :func:`megatron_dsa.ops.compressor.api.compress`.

    Args:
        values, scores: ``[tokens, c * d]``; ``c`` is 2 with overlap, else 1.
        ape: ``[ratio, c * d]``; its length is the ratio, at least 2.
        overlap: a group also pools the positions of the group before it.
        cu_seqlens, max_seqlen, cu_seqlens_padded: lengths of packed sequences, as of
            :func:`indexer_topk`.
        policy: which implementations may run.

    Returns:
        ``[tokens // ratio, d]``: group ``g`` of the sequence that starts at row ``o`` is row
        ``o // ratio + g``; rows in between are 0. Differentiable in values, scores and ape; the
        backward runs the forward again.
    """
    return _compress(
        values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen,
        policy_text(policy),
    )  # fmt: skip


@registered("compress")
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
    """Return the number of slots, if shapes and dtypes fit."""
    check_lengths(cu_seqlens, cu_seqlens_padded, max_seqlen)
    ratio = ape.shape[0] if ape.dim() else 0
    # The sizes of groups are checked before there are any.
    none = values.new_empty(0, dtype=torch.int32)
    CompressorInputs(values, scores, ape, Groups(none, none, 1), ratio, overlap, 0).check()
    return values.shape[0] // ratio


@_compress.register_fake
def _(
    values, scores, ape, overlap, cu_seqlens=None, cu_seqlens_padded=None, max_seqlen=None,
    policy="",
):  # fmt: skip
    slots = _check(values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen)
    return values.new_empty(slots, values.shape[1] // (2 if overlap else 1))


@registered("compress_backward")
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


@_backward.register_fake
def _(
    dpooled, values, scores, ape, cu_seqlens, cu_seqlens_padded, overlap, max_seqlen=None,
    policy="",
):  # fmt: skip
    _check(values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen)
    return tuple(map(empty_like, (values, scores, ape)))


def _keep(ctx, inputs, output):
    values, scores, ape, overlap, cu_seqlens, cu_seqlens_padded, max_seqlen, policy = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(values, scores, ape, cu_seqlens, cu_seqlens_padded)
    ctx.rest = overlap, max_seqlen, policy


@once_differentiable
def _differentiate(ctx, dpooled):
    if dpooled is None:
        return (None,) * 8
    return *_backward(dpooled, *ctx.saved_tensors, *ctx.rest), *(None,) * 5


torch.library.register_autograd("megatron_dsa::compress", _differentiate, setup_context=_keep)
