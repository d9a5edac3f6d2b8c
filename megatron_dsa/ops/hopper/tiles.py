"""What our Hopper kernels share: tile sizes, copies of rows, lists of keys."""

# No postponed annotations here: TileLang reads the kernels' shapes from them.
from tilelang import language as T

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
#: Rows of a tile, and keys of a block: what wgmma multiplies at once.
TILE = 64
#: Threads of a warpgroup, and rows that they copy at a time, 16 bytes per thread.
GROUP, ROWS = 128, 16
#: Columns of a swizzled slab of shared memory.
SLAB = 64
#: Bytes of shared memory that a thread block can have.
SHARED = 227 * 1024
#: Queries of a tile at most: a byte of a list's Members has a bit for each.
MOST_QUERIES = 8

#: Source of a fence that keeps the compiler from loading everything first, which costs registers
#: that are not there.
NO_HOISTING = r"""
__device__ __forceinline__ void dsa_no_hoisting() { asm volatile("" ::: "memory"); }
"""
#: Source for kernels that use addresses in shared memory as integers.
ADDRESSES = r"""
__device__ __forceinline__ int dsa_here(const void* what) {
  return static_cast<int>(__cvta_generic_to_shared(what));
}
// Keeps TileLang from giving a buffer's memory to others before here.
__device__ __forceinline__ void dsa_keep(const void* a, const void* b) {}
"""


def queries_per_tile(heads: int, tile: int = TILE) -> int:
    """How many adjacent queries of ``heads`` heads the rows of a tile hold."""
    return max(1, min(tile // heads, MOST_QUERIES))


def check_tiling(heads: int, dim: int, v_dim: int, group: int, tile: int = TILE) -> None:
    """Raise ``ValueError`` for dims, or a group of queries, that the tiling does not fit."""
    if v_dim != 512 or dim not in (576, 512):
        raise ValueError(
            f"dim, v_dim must be (576, 512) or (512, 512), got ({dim}, {v_dim}): the warpgroups "
            "split 512 value columns in halves and at most 64 more; use another implementation"
        )
    most = queries_per_tile(heads, tile)
    if not 1 <= group <= most:
        raise ValueError(
            f"group must be 1 to {most} queries of {heads} heads, got {group}: "
            f"a tile has {tile} rows, and Members a byte per key"
        )


def head_tiles(heads: int, tile: int = TILE) -> int:
    """How many tiles the heads of one query take."""
    return -(-heads // tile)


def tile_of(block, heads: int, group: int, rows, tile: int = TILE):
    """Return a thread block's list, its first head, its first row and how many rows it has."""
    tiles = head_tiles(heads, tile)
    place, head = block // tiles, block % tiles * tile
    first = place * group * heads + head
    # The last group may have fewer queries than the others.
    owned = T.min(heads - head, tile) if group == 1 else T.min(rows - first, group * heads)
    return place, head, first, owned


@T.macro
def fetch(target, source, row, from_row, wanted, columns, thread, offset=0):
    """Copy ``columns`` (a tuple: first, last) of a row asynchronously; zeros if not wanted.

    In the source they begin ``offset`` columns later.
    """
    for u in T.unroll((columns[1] - columns[0]) // SLAB):
        T.ptx_cp_async(
            T.access_ptr(target[row, columns[0] + SLAB * u + thread % 8 * 8], "w", 8),
            T.access_ptr(source[from_row, offset + columns[0] + SLAB * u + thread % 8 * 8], "r", 8),
            8,
            predicate=wanted,
        )


@T.macro
def list_ahead(Ids, Members, at, i, keys, group, thread, ids, members):
    """Read part ``i`` of a list (``keys`` long) before it is needed; past its end is no key."""
    ids[0] = -1
    members[0] = T.cast(0, "uint8")
    if thread < keys and i * keys + thread < at.n:
        ids[0] = Ids[at.list, i * keys + thread]
        if group > 1:
            members[0] = Members[at.list, i * keys + thread]
