"""Bits of listed keys in Triton: one atomic operation per listed key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.masked_attention.bits import WORDS, groups
from megatron_dsa.ops.masked_attention.inputs import KeyBitsInputs

_BLOCK = 1024


# What follows the batch must not compile the kernel again.
@triton.jit(do_not_specialize=["indices", "length", "bits", "num_keys", "topk", "stride", "words"])
def _set_bits(
    indices, length, bits, num_keys, topk, stride, words, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per query and ``BLOCK`` entries; ``words`` is the number of int32 of a query."""
    query = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < topk
    if length is not None:
        inside &= column < tl.load(length + query)
    key = tl.load(indices + query * stride + column, mask=inside, other=-1)
    valid = inside & (key >= 0) & (key < num_keys)
    in_group = key % 128
    word = key // 128 * 4 + in_group % 8 // 2
    bit = tl.full([BLOCK], 1, tl.int32) << (in_group // 8 * 2 + in_group % 2)
    tl.atomic_or(bits + query * words + word, bit, mask=valid, sem="relaxed")


def key_bits(inputs: KeyBitsInputs) -> torch.Tensor:
    """Return int32 ``[Sq, G, 4]``, the bits of the listed keys."""
    indices = inputs.indices if inputs.indices.stride(-1) == 1 else inputs.indices.contiguous()
    queries, width = indices.shape
    bits = indices.new_zeros(queries, groups(inputs.num_keys), WORDS)
    if bits.numel() > 0 and width > 0:
        length = None if inputs.topk_length is None else inputs.topk_length.contiguous()
        _set_bits[(queries, triton.cdiv(width, _BLOCK))](
            indices, length, bits, inputs.num_keys, width, indices.stride(0),
            bits.shape[1] * WORDS, BLOCK=_BLOCK,
        )  # fmt: skip
    return bits
