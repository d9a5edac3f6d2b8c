"""Tile sizes of the portable kernels per GPU, and the gather of keys."""

from dataclasses import dataclass

from tilelang import language as T

from megatron_dsa.ops.hopper.tiles import COPIERS, fetch


@dataclass(frozen=True)
class Tiling:
    """Query heads and key buffers of a thread block.

    Attributes:
        rows: query heads, of one or several queries.
        stages: buffers for blocks of keys; with one, computation cannot overlap the gather.
    """

    rows: int
    keys: int
    stages: int
    threads: int

    @property
    def copied(self) -> int:
        return self.threads // COPIERS


#: Bytes of shared memory per thread block.
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


def tiling_of(tilings: dict[str, Tiling], target: str) -> Tiling:
    if target not in tilings:
        raise ValueError(
            f"target must be one of {', '.join(tilings)}, got {target!r}: tiles are chosen for the "
            "shared memory of these; use the torch implementation or add a tiling"
        )
    return tilings[target]


def check_memory(needed: int, target: str) -> None:
    if needed > SHARED[target]:
        raise ValueError(
            f"tiling must fit the {SHARED[target]} bytes of shared memory of {target}, got one "
            f"that needs {needed}: use fewer rows, keys or stages"
        )


def key_memory(tiling: Tiling, dim: int) -> int:
    return tiling.stages * tiling.keys * (2 * dim + 4 + 1)


@T.macro
def look_ahead(lists, at, i, tiling, thread):
    for r in T.unroll(tiling.keys // tiling.copied):
        lists.ahead[r] = -1
        lists.members[r] = T.cast(1, "uint8")
        slot = i * tiling.keys + r * tiling.copied + thread // COPIERS
        if slot < at.n:
            lists.ahead[r] = lists.Ids[at.list, slot]
            if lists.group > 1:
                lists.members[r] = lists.Members[at.list, slot]


@T.macro
def gather(lists, m, at, i, tiling, thread):
    first = i % tiling.stages * tiling.keys
    for r in T.unroll(tiling.keys // tiling.copied):
        row = first + r * tiling.copied + thread // COPIERS
        key = T.if_then_else(lists.ahead[r] < lists.KV.shape[0], lists.ahead[r], -1)
        if thread % COPIERS == 0:
            if m.ids is not None:
                m.ids[row] = key
            m.members[row] = T.if_then_else(key >= 0, lists.members[r], T.cast(0, "uint8"))
        fetch(m.k, lists.KV, row, T.max(key, 0), key >= 0, (0, lists.KV.shape[1]), thread)
    look_ahead(lists, at, i + 1, tiling, thread)


@T.macro
def gather_first(lists, m, at, tiling, thread):
    look_ahead(lists, at, 0, tiling, thread)
    for i in tuple(range(tiling.stages - 1)):
        gather_next(lists, m, at, i, tiling, thread)


@T.macro
def gather_next(lists, m, at, i, tiling, thread):
    if i < at.blocks(tiling.keys):
        gather(lists, m, at, i, tiling, thread)
    T.ptx_commit_group()
