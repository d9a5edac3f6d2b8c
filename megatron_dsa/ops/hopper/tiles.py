"""Tile sizes, copies and key lists of our Hopper kernels.

In the macros, ``at`` is the thread block's work, ``m`` its shared memory, ``done`` its barriers.
"""

# Postponed annotations would hide shapes from TileLang.
from dataclasses import dataclass
from typing import Any

from tilelang import language as T

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
#: Query heads per tile and keys per block.
TILE = 64
#: Number of threads that copy one key or query, 16 bytes per copy.
COPIERS = 8
#: Threads of a warpgroup, and keys that a warpgroup copies at a time.
GROUP, COPIED_KEYS = 128, 128 // COPIERS
#: Columns per swizzled slab of shared memory.
SLAB = 64
#: Value columns: all, half and a quarter.
V_DIM, HALF, QUARTER = 512, 256, 128
#: Bytes of shared memory per thread block.
SHARED = 227 * 1024
#: Maximum queries of a tile, one per bit of a byte.
MOST_QUERIES = 8


def queries_per_tile(heads: int, tile: int = TILE) -> int:
    return max(1, min(tile // heads, MOST_QUERIES))


@dataclass(frozen=True)
class Shape:
    """Sizes of a sparse attention kernel; a tile has ``group`` queries."""

    heads: int
    dim: int
    v_dim: int
    group: int = 1
    tile: int = TILE

    def __post_init__(self):
        heads, dim, v_dim = self.heads, self.dim, self.v_dim
        if v_dim != V_DIM or dim not in (V_DIM + SLAB, V_DIM):
            raise ValueError(
                f"dim, v_dim must be (576, 512) or (512, 512), got ({dim}, {v_dim}): the "
                "warpgroups split 512 value columns in halves and at most 64 more; use another "
                "implementation"
            )
        most = queries_per_tile(heads, self.tile)
        if not 1 <= self.group <= most:
            raise ValueError(
                f"group must be 1 to {most} queries of {heads} heads, got {self.group}: "
                f"a tile has {self.tile} rows, and Members a byte per key"
            )

    @property
    def tail(self) -> int:
        """Number of key columns past the value."""
        return self.dim - self.v_dim

    @property
    def tiles(self) -> int:
        return head_tiles(self.heads, self.tile)


def head_tiles(heads: int, tile: int = TILE) -> int:
    return -(-heads // tile)


@dataclass(frozen=True)
class BlockWork:
    """Heads and queries of the ``rank``-th thread block for a list of ``n`` keys."""

    list: Any
    head: Any
    first: Any
    rows: Any
    n: Any
    rank: Any = 0

    def blocks(self, keys: int = TILE):
        return T.ceildiv(self.n, keys)


@T.macro
def block_work(block, Length, rows, shape):
    index, rank = block // shape.tiles, block % shape.tiles
    head = rank * shape.tile
    first = index * shape.group * shape.heads + head
    tile_rows = (
        T.min(shape.heads - head, shape.tile)
        if shape.group == 1
        else T.min(rows - first, shape.group * shape.heads)
    )
    n = Length[index]
    return BlockWork(index, head, first, tile_rows, n, rank)


@T.macro
def fetch(target, source, row, from_row, wanted, columns, thread, offset=0):
    """Copy ``columns`` of a key asynchronously; write zeros if not ``wanted``."""
    for u in T.unroll((columns[1] - columns[0]) // SLAB):
        T.ptx_cp_async(
            T.access_ptr(target[row, columns[0] + SLAB * u + thread % 8 * 8], "w", 8),
            T.access_ptr(source[from_row, offset + columns[0] + SLAB * u + thread % 8 * 8], "r", 8),
            8,
            predicate=wanted,
        )


@T.macro
def fetch_tile(copies, at, tile, threads, thread):
    """Copy a tile asynchronously; write zeros past the end.

    ``copies`` has tuples of target ``[tile, columns]``, source, and columns (first, last).
    """
    # Unpacking ``copy`` would rename the buffers in the generated source.
    for r in T.unroll(tile // (threads // COPIERS)):
        row = r * (threads // COPIERS) + thread // COPIERS
        for copy in copies:
            from_row = T.min(at.first + row, copy[1].shape[0] - 1)
            fetch(copy[0], copy[1], row, from_row, row < at.rows, copy[2], thread)


@dataclass(frozen=True)
class Lists:
    """Keys and key lists of a launch, and registers of a gathering thread.

    Attributes:
        Ids, Members: a list per group of queries, and bits for the queries that selected an entry.
        ahead, members: prefetched entries of Ids and Members.
        ids: keys that this thread helps to copy.
    """

    KV: Any
    Ids: Any
    Members: Any
    group: int
    ahead: Any
    members: Any
    ids: Any = None


@T.macro
def list_ahead(lists, at, i, keys, thread):
    lists.ahead[0] = -1
    lists.members[0] = T.cast(0, "uint8")
    if thread < keys and i * keys + thread < at.n:
        lists.ahead[0] = lists.Ids[at.list, i * keys + thread]
        if lists.group > 1:
            lists.members[0] = lists.Members[at.list, i * keys + thread]
