"""Triton kernels that compute key bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.masked_attention.spec import (
    WORDS,
    KeyBitsInputs,
    VisibleBitsInputs,
    groups,
)

_ENTRIES, _WORDS = 1024, 128


@triton.jit(do_not_specialize=["indices", "length", "bits", "num_keys", "topk", "stride", "words"])
def _set_bits(
    indices, length, bits, num_keys, topk, stride, words, BLOCK: tl.constexpr
):  # fmt: skip
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
    indices = inputs.indices if inputs.indices.stride(-1) == 1 else inputs.indices.contiguous()
    queries, width = indices.shape
    bits = indices.new_zeros(queries, groups(inputs.num_keys), WORDS)
    if bits.numel() > 0 and width > 0:
        length = None if inputs.topk_length is None else inputs.topk_length.contiguous()
        launch(
            _set_bits, (queries, ceil_div(width, _ENTRIES)),
            indices, length, bits, inputs.num_keys, width, indices.stride(0),
            bits.shape[1] * WORDS, BLOCK=_ENTRIES,
        )  # fmt: skip
    return bits


@triton.jit(do_not_specialize=["num_keys", "words"])
def _visible_bits(start, end, slots, bits, num_keys, words, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    first, last = tl.load(start + query), tl.load(end + query)
    word, bit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 32)
    in_group = bit[None, :] // 2 * 8 + word[:, None] % 4 * 2 + bit[None, :] % 2
    key = word[:, None] // 4 * 128 + in_group
    exists = key < num_keys
    slot = key
    if slots is not None:
        slot = tl.load(slots + key, mask=exists, other=-1)
    seen = exists & (slot >= first) & (slot < last)
    # Bits are disjoint, so their sum is the word.
    value = tl.sum(seen.to(tl.int32) << bit[None, :], 1)
    tl.store(bits + query * words + word, value, mask=word < words)


def visible_bits(inputs: VisibleBitsInputs) -> torch.Tensor:
    start, end = inputs.start.contiguous(), inputs.end.contiguous()
    bits = start.new_empty(len(start), groups(inputs.num_keys), WORDS)
    words = bits.shape[1] * WORDS
    if bits.numel() > 0:
        launch(
            _visible_bits, (len(start), ceil_div(words, _WORDS)),
            start, end, inputs.slots, bits, inputs.num_keys, words, BLOCK=_WORDS,
        )  # fmt: skip
    return bits
