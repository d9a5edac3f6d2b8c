"""Tiles of the portable kernels per GPU, and how their keys arrive in shared memory."""

# No postponed annotations here: TileLang reads the kernels' shapes from them.
from dataclasses import dataclass

import tilelang
from tilelang import language as T

from megatron_dsa.ops.hopper.tiles import fetch

#: Threads that copy one row of keys or queries, 16 bytes each.
COPIERS = 8


@dataclass(frozen=True)
class Tiling:
    """What one thread block works on.

    Attributes:
        rows: rows of queries (heads of one query, or of several).
        keys: keys of a block.
        stages: buffers for blocks of keys; with one, nothing overlaps with the gather.
        threads: threads of a thread block.
    """

    rows: int
    keys: int
    stages: int
    threads: int

    @property
    def copied(self) -> int:
        """Rows that all threads copy at once."""
        return self.threads // COPIERS


#: Bytes of shared memory that a thread block can have.
SHARED = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}
_LARGE_FORWARD, _LARGE_BACKWARD = Tiling(64, 64, 2, 256), Tiling(64, 32, 2, 256)
FORWARD = {
    "sm_80": Tiling(64, 32, 2, 256),
    "sm_89": Tiling(32, 16, 2, 128),
    "sm_90a": _LARGE_FORWARD,
    "sm_100a": _LARGE_FORWARD,
}
BACKWARD = {
    "sm_80": Tiling(32, 32, 2, 256),
    "sm_89": Tiling(32, 16, 1, 128),
    "sm_90a": _LARGE_BACKWARD,
    "sm_100a": _LARGE_BACKWARD,
}
#: Only TileLang's wgmma would not run elsewhere; barriers that it inserts stay.
PASSES = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WGMMA: True,
}


def tiling_of(tilings: dict[str, Tiling], target: str) -> Tiling:
    """Return the tiling for ``target``.

    Raises:
        ValueError: a target that there is none for.
    """
    if target not in tilings:
        raise ValueError(
            f"target must be one of {', '.join(tilings)}, got {target!r}: tiles are chosen for the "
            "shared memory of these; use the torch implementation or add a tiling"
        )
    return tilings[target]


def check_memory(needed: int, target: str) -> None:
    """Raise ``ValueError`` if ``needed`` bytes are more than a thread block of ``target`` has."""
    if needed > SHARED[target]:
        raise ValueError(
            f"tiling must fit the {SHARED[target]} bytes of shared memory of {target}, got one "
            f"that needs {needed}: use fewer rows, keys or stages"
        )


def key_memory(tiling: Tiling, dim: int) -> int:
    """Bytes of the buffers that :func:`gather` fills: keys (bf16), ids, members."""
    return tiling.stages * tiling.keys * (2 * dim + 4 + 1)


def fetch_rows(target, source, columns, at, tiling, rows, thread):
    """Copy a tile's rows of ``source`` ``[rows, columns]`` asynchronously, zeros past the tile."""

    @T.macro
    def copy(target, source, at, thread):
        for r in T.unroll(tiling.rows // tiling.copied):
            row = r * tiling.copied + thread // COPIERS
            from_row = T.min(at.first + row, rows - 1)
            fetch(target, source, row, from_row, row < at.rows, (0, columns), thread)

    copy(target, source, at, thread)


@T.macro
def look_ahead(Ids, Members, at, i, tiling, group, ahead, members, thread):
    """Read a thread's part of block ``i`` of the list before it is needed; -1 past the end."""
    for r in T.unroll(tiling.keys // tiling.copied):
        ahead[r] = -1
        members[r] = T.cast(1, "uint8")
        place = i * tiling.keys + r * tiling.copied + thread // COPIERS
        if place < at.n:
            ahead[r] = Ids[at.list, place]
            if group > 1:
                members[r] = Members[at.list, place]


@T.macro
def gather(KV, m, i, tiling, dim, keys, ahead, members, thread):
    """Fetch the keys of block ``i``, and note which queries selected them; zeros for no key.

    A backward also wants their ids, -1 for no key.
    """
    first = i % tiling.stages * tiling.keys
    for r in T.unroll(tiling.keys // tiling.copied):
        row = first + r * tiling.copied + thread // COPIERS
        key = T.if_then_else(ahead[r] < keys, ahead[r], -1)
        if thread % COPIERS == 0:
            if m.ids is not None:
                m.ids[row] = key
            m.members[row] = T.if_then_else(key >= 0, members[r], T.cast(0, "uint8"))
        fetch(m.k, KV, row, T.max(key, 0), key >= 0, (0, dim), thread)
