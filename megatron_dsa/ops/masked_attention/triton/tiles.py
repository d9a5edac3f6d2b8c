"""Which tiles of queries and keys are not empty, and the bits along queries; all on the device.

The kernels walk over lists of tiles; those of the keys' gradient hold keys along the rows of an
accumulator, so they read the bits of a key for many queries.
:mod:`megatron_dsa.ops.masked_attention.reference` states what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.masked_attention.bits import GROUP, WORDS, groups

#: Queries of a flag: two flags per group of queries.
QUERY_BLOCK = 64


@dataclass(frozen=True)
class Tiles:
    """Lists of the tiles that are not empty; entries of a list past its count may be anything.

    Attributes:
        key_groups: int32 ``[Gq, G]``, per group of 128 queries the groups of 128 keys of which it
            selects any, ascending. ``Gq = ceil(Sq / 128)``, ``G = ceil(Skv / 128)``.
        key_group_count: int32 ``[Gq]``, how many.
        bits_t: int32 ``[128 G, Gq, 4]``, the bits along queries; ``None`` without queries.
        query_blocks: int32 ``[G, 2 Gq]``, per group of 128 keys the blocks of 64 queries that
            select any of them, ascending; ``None`` without queries.
        query_block_count: int32 ``[G]``, how many; ``None`` without queries.
    """

    key_groups: torch.Tensor
    key_group_count: torch.Tensor
    bits_t: torch.Tensor | None = None
    query_blocks: torch.Tensor | None = None
    query_block_count: torch.Tensor | None = None


def tiles_for(bits: torch.Tensor, num_keys: int, with_queries: bool) -> Tiles:
    """Return the tiles of ``bits`` int32 ``[Sq, G, 4]``.

    Args:
        bits: key bits (:mod:`megatron_dsa.ops.masked_attention.bits`).
        num_keys: number of keys.
        with_queries: also return what a backward reads: bits along queries, and lists of queries.
    """
    if not with_queries:
        return Tiles(*tile_lists(_either_half(_tile_flags(bits, None))))
    bits_t, flags = transpose(bits, num_keys)
    return Tiles(*tile_lists(_either_half(flags)), bits_t, *tile_lists(flags.t()))


def transpose(bits: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``bits_t`` int32 ``[128 G, Gq, 4]`` and ``flags`` uint8 ``[2 Gq, G]``.

    Word ``l`` of a key and a group of queries ``g`` has the queries ``128 g + 8 n + 2 l + e`` at
    bit ``2 n + e``; ``flags[i, g]`` says whether any of the queries from ``64 i`` up to
    ``64 i + 63`` selects any key of group ``g``.

    Args:
        bits: int32 ``[Sq, G, 4]``, key bits.
        num_keys: number of keys.
    """
    bits_t = bits.new_empty(groups(num_keys) * GROUP, groups(len(bits)), WORDS)
    return bits_t, _tile_flags(bits, bits_t)


def tile_lists(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per row the columns whose flag is set, ascending, and how many these are.

    Args:
        flags: uint8 ``[rows, columns]``, any strides.

    Returns:
        int32 ``[rows, columns]``, whose entries past the count may be anything; int32 ``[rows]``.
    """
    rows, columns = flags.shape
    ids = flags.new_empty(rows, columns, dtype=torch.int32)
    count = flags.new_empty(rows, dtype=torch.int32)
    if rows > 0:
        _list_tiles[(rows,)](flags, ids, count, columns, *flags.stride(), BLOCK=512)
    return ids, count


def _either_half(flags: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[Gq, G]``, the flags of groups of 128 queries."""
    return flags[0::2] | flags[1::2]


def _tile_flags(bits: torch.Tensor, bits_t: torch.Tensor | None) -> torch.Tensor:
    """Return the flags of the tiles; fill ``bits_t`` if it is given."""
    bits = bits.contiguous()
    queries, key_groups = bits.shape[:2]
    query_groups = groups(queries)
    flags = bits.new_empty(2 * query_groups, key_groups, dtype=torch.uint8)
    if flags.numel() > 0:
        _transpose[(key_groups * query_groups,)](
            bits, bits_t, flags, queries, key_groups, query_groups
        )
    return flags


# Sizes follow the batch and must not compile kernels again.
@triton.jit(do_not_specialize=["queries", "key_groups", "query_groups"])
def _transpose(bits, bits_t, flags, queries, key_groups, query_groups):
    """One program per tile of 128 queries and 128 keys; neighbours share the queries."""
    query_group, key_group = tl.program_id(0) // key_groups, tl.program_id(0) % key_groups
    # 16 matrices of 32 x 32 bits: a word of queries (a column's quarter) by a word of keys.
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 16)[None, :]
    key_word, query_word = column % 4, column // 4
    query = query_group * 128 + row // 2 * 8 + query_word * 2 + row % 2
    at = (query.to(tl.int64) * key_groups + key_group) * 4 + key_word
    x = tl.load(bits + at, mask=query < queries, other=0).to(tl.uint32, bitcast=True)
    # The first 16 rows are the first 64 queries.
    some = tl.max((x != 0).to(tl.int32), 1)
    half = tl.arange(0, 32) // 16
    for side in tl.static_range(2):
        found = tl.max(tl.where(half == side, some, 0), 0)
        flag = (query_group * 2 + side).to(tl.int64) * key_groups + key_group
        tl.store(flags + flag, found.to(tl.uint8))
    if bits_t is not None:
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
    """Swap the off-diagonal quarters of all ``2 * distance`` square blocks of bits."""
    other = tl.gather(x, (row ^ distance).broadcast_to(x.shape), 0)
    is_low = (row & distance) == 0
    upper, lower = tl.where(is_low, x, other), tl.where(is_low, other, x)
    change = ((upper >> distance) ^ lower) & low
    return x ^ tl.where(is_low, change << distance, change)


@triton.jit(do_not_specialize=["columns", "row_stride", "column_stride"])
def _list_tiles(flags, ids, count, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    found = 0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        at = row * row_stride + column.to(tl.int64) * column_stride
        flag = (tl.load(flags + at, mask=column < columns, other=0) != 0).to(tl.int32)
        place = found + tl.cumsum(flag, 0) - 1
        tl.store(ids + row * columns + place, column, mask=flag != 0)
        found += tl.sum(flag, 0)
    tl.store(count + row, found)
