"""Bits of visible keys in Triton: one launch, which writes every word once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.masked_attention.bits import WORDS, groups
from megatron_dsa.ops.masked_attention.inputs import VisibleBitsInputs

#: Words that a program writes.
_BLOCK = 128


# What follows the batch must not compile the kernel again.
@triton.jit(do_not_specialize=["num_keys", "words"])
def _visible_bits(start, end, slots, bits, num_keys, words, BLOCK: tl.constexpr):
    """One program per query and ``BLOCK`` words; ``words`` is the number of int32 of a query."""
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
    """Return int32 ``[Sq, G, 4]``, the bits of the visible keys."""
    start, end = inputs.start.contiguous(), inputs.end.contiguous()
    bits = start.new_empty(len(start), groups(inputs.num_keys), WORDS)
    words = bits.shape[1] * WORDS
    if bits.numel() > 0:
        _visible_bits[(len(start), triton.cdiv(words, _BLOCK))](
            start, end, inputs.slots, bits, inputs.num_keys, words, BLOCK=_BLOCK
        )
    return bits
