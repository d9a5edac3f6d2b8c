"""Lists of non-empty tiles, and transposed key bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.masked_attention.spec import GROUP, WORDS, groups


@dataclass(frozen=True)
class Tiles:
    """Lists of non-empty tiles, undefined past their counts.

    ``Gq = ceil(Sq / 128)``, ``G = ceil(Skv / 128)``.

    Attributes:
        key_groups: int32 ``[Gq, G]``, ascending groups of 128 keys per group of 128 queries.
        bits_t: int32 ``[128 G, Gq, 4]``, the transposed bits.
        query_blocks: int32 ``[G, 2 Gq]``, ascending blocks of 64 queries per group of 128 keys.
    """

    key_groups: torch.Tensor
    key_group_count: torch.Tensor
    bits_t: Any = None
    query_blocks: Any = None
    query_block_count: Any = None


def tiles_for(bits: torch.Tensor, num_keys: int, with_queries: bool) -> Tiles:
    if not with_queries:
        return Tiles(*_key_groups(bits))
    bits_t, flags = transpose(bits, num_keys)
    key_groups, key_group_count, *query_blocks = tile_lists(flags)
    return Tiles(key_groups, key_group_count, bits_t, *query_blocks)


def transpose(bits: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``bits_t`` int32 ``[128 G, Gq, 4]`` and ``flags`` uint8 ``[2 Gq, G]``.

    Bit ``2 n + e`` of a key's word ``l`` for group ``g`` is query ``128 g + 8 n + 2 l + e``.
    ``flags[i, g]`` is 1 if a query from ``64 i`` to ``64 i + 63`` selects a key of group ``g``.
    """
    bits = bits.contiguous()
    (queries, key_groups), query_groups = bits.shape[:2], groups(len(bits))
    bits_t = bits.new_empty(groups(num_keys) * GROUP, query_groups, WORDS)
    flags = bits.new_empty(2 * query_groups, key_groups, dtype=torch.uint8)
    if flags.numel() > 0:
        launch(
            _transpose, (key_groups * query_groups,),
            bits, bits_t, flags, queries, key_groups, query_groups,
        )  # fmt: skip
    return bits_t, flags


def tile_lists(flags: torch.Tensor) -> tuple[torch.Tensor, ...]:
    blocks, key_groups = flags.shape
    query_groups = blocks // 2
    of_queries, of_keys = _lists(flags, query_groups, key_groups), _lists(flags, key_groups, blocks)
    if query_groups + key_groups > 0:
        launch(
            _list_tiles, (query_groups + key_groups,),
            flags, *of_queries, *of_keys, query_groups, key_groups, BLOCK=512,
        )  # fmt: skip
    return *of_queries, *of_keys


def _lists(like: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = like.new_empty(rows, columns, dtype=torch.int32)
    return ids, like.new_empty(rows, dtype=torch.int32)


def _key_groups(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = bits.contiguous()
    queries, key_groups = bits.shape[:2]
    ids, count = _lists(bits, groups(queries), key_groups)
    if count.numel() > 0:
        launch(_list_key_groups, (len(count),), bits, ids, count, queries, key_groups, BLOCK=16)
    return ids, count


@triton.jit(do_not_specialize=["queries", "key_groups", "query_groups"])
def _transpose(bits, bits_t, flags, queries, key_groups, query_groups):
    """Transpose a tile of 128 queries and 128 keys; adjacent programs share queries."""
    query_group, key_group = tl.program_id(0) // key_groups, tl.program_id(0) % key_groups
    # A tile is 16 matrices of 32 x 32 bits, one per query word and key word.
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 16)[None, :]
    key_word, query_word = column % 4, column // 4
    query = query_group * 128 + row // 2 * 8 + query_word * 2 + row % 2
    at = (query.to(tl.int64) * key_groups + key_group) * 4 + key_word
    x = tl.load(bits + at, mask=query < queries, other=0).to(tl.uint32, bitcast=True)
    some = tl.max((x != 0).to(tl.int32), 1)
    half = tl.arange(0, 32) // 16
    for side in tl.static_range(2):
        found = tl.max(tl.where(half == side, some, 0), 0)
        flag = (query_group * 2 + side).to(tl.int64) * key_groups + key_group
        tl.store(flags + flag, found.to(tl.uint8))
    x = _swap(x, row, 16, 0x0000FFFF)
    x = _swap(x, row, 8, 0x00FF00FF)
    x = _swap(x, row, 4, 0x0F0F0F0F)
    x = _swap(x, row, 2, 0x33333333)
    x = _swap(x, row, 1, 0x55555555)
    key = key_group * 128 + row // 2 * 8 + key_word * 2 + row % 2
    at = (key.to(tl.int64) * query_groups + query_group) * 4 + query_word
    tl.store(bits_t + at, x.to(tl.int32, bitcast=True))


@triton.jit
def _swap(x, row, distance: tl.constexpr, low: tl.constexpr):
    other = tl.gather(x, (row ^ distance).broadcast_to(x.shape), 0)
    is_low = (row & distance) == 0
    upper, lower = tl.where(is_low, x, other), tl.where(is_low, other, x)
    change = ((upper >> distance) ^ lower) & low
    return x ^ tl.where(is_low, change << distance, change)


@triton.jit(do_not_specialize=["query_groups", "key_groups"])
def _list_tiles(
    flags, key_ids, key_count, block_ids, block_count, query_groups, key_groups, BLOCK: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    found = 0
    if group < query_groups:
        first_half = flags + 2 * group * key_groups
        for first in range(0, key_groups, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < key_groups
            flag = tl.load(first_half + column, mask=inside, other=0)
            flag |= tl.load(first_half + key_groups + column, mask=inside, other=0)
            found = _append(key_ids + group * key_groups, column, flag, found)
        tl.store(key_count + group, found)
    else:
        group -= query_groups
        for first in range(0, 2 * query_groups, BLOCK):
            block = first + tl.arange(0, BLOCK)
            at = block.to(tl.int64) * key_groups + group
            flag = tl.load(flags + at, mask=block < 2 * query_groups, other=0)
            found = _append(block_ids + group * 2 * query_groups, block, flag, found)
        tl.store(block_count + group, found)


@triton.jit
def _append(ids, entry, flag, found):
    is_set = (flag != 0).to(tl.int32)
    slot = found + tl.cumsum(is_set, 0) - 1
    tl.store(ids + slot, entry, mask=is_set != 0)
    return found + tl.sum(is_set, 0)


@triton.jit(do_not_specialize=["queries", "key_groups"])
def _list_key_groups(bits, ids, count, queries, key_groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    query = group * 128 + tl.arange(0, 128)
    found = 0
    for first in range(0, key_groups, BLOCK):
        word = first * 4 + tl.arange(0, 4 * BLOCK)
        inside = (query < queries)[:, None] & (word < 4 * key_groups)[None, :]
        at = query[:, None] * (4 * key_groups) + word[None, :]
        some = tl.max((tl.load(bits + at, mask=inside, other=0) != 0).to(tl.int32), 0)
        flag = tl.max(tl.reshape(some, [BLOCK, 4]), 1)
        column = first + tl.arange(0, BLOCK)
        found = _append(ids + group * key_groups, column, flag, found)
    tl.store(count + group, found)
