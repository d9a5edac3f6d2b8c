"""Selected keys of key bits, as lists, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Groups of 128 keys of a program.
_GROUPS = 8


def listed_keys(
    bits: torch.Tensor, before: torch.Tensor, length: torch.Tensor, width: int
) -> torch.Tensor:
    """Return int32 ``[Sq, width]``: the selected keys of every query, ascending, then -1.

    Args:
        bits: int32 ``[Sq, G, 4]``, key bits, contiguous.
        before: int32 ``[Sq, G]``, how many keys a query selects of the groups before each.
        length: int32 ``[Sq]``, how many it selects.
        width: entries of a list; keys beyond are left out.
    """
    queries, key_groups = bits.shape[:2]
    if key_groups == 0:
        return bits.new_full((queries, width), -1)
    indices = bits.new_empty(queries, width)
    if queries > 0 and width > 0:
        grid = (queries, triton.cdiv(key_groups, _GROUPS))
        _list_keys[grid](
            bits, before, length, indices, key_groups, width, GROUPS=_GROUPS, BLOCK=256
        )
    return indices


# Sizes follow the batch and must not compile kernels again.
@triton.jit(do_not_specialize=["key_groups", "width"])
def _list_keys(
    bits, before, length, indices, key_groups, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per query and ``GROUPS`` groups of keys; each fills a share of the rest."""
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    total = tl.load(length + query)
    share = tl.cdiv(width, tl.num_programs(1))
    begin = tl.program_id(1) * share
    for start in range(0, share, BLOCK):
        entry = begin + start + tl.arange(0, BLOCK)
        rest = (entry >= total) & (entry < tl.minimum(begin + share, width))
        tl.store(indices + query * width + entry, -1, mask=rest)
    at = before + query * key_groups + first
    found = tl.load(at)
    end = total
    if first + GROUPS < key_groups:
        end = tl.load(at + GROUPS)
    if found < end:  # most programs behind the diagonal have nothing to list
        key = tl.arange(0, GROUPS * 128)
        word = (query * key_groups + first) * 4 + key // 128 * 4 + key % 8 // 2
        x = tl.load(bits + word, mask=first + key // 128 < key_groups, other=0)
        flag = (x >> (key % 128 // 8 * 2 + key % 2)) & 1
        place = found + tl.cumsum(flag, 0) - 1
        target = indices + query * width + place
        tl.store(target, first * 128 + key, mask=(flag != 0) & (place < width))
