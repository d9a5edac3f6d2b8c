"""Tiles, dims and scheduling of the masked attention kernels.

In macros, ``at`` is the thread block's work, ``m`` its shared memory, ``done`` its barriers and
``tx`` the thread index.
"""

from dataclasses import dataclass
from typing import Any, Self

import tilelang
from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS
from megatron_dsa.ops.hopper.tiles import GROUP

KEYS = 128
STAGES = 2
#: Registers per consumer thread and per producer thread.
REGISTERS = (240, 24)
THREADS = 3 * GROUP
#: Compiler options; TileLang's guards against out-of-range accesses would cost registers.
PASSES = MANUAL_BARRIERS | {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
BY_ROWS, BY_COLUMNS = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol

#: CUDA function that maps a thread block to a block of queries or keys, a head, and the number of
#: tiles. ``together`` heads run at a time, so that their keys stay in L2.
BLOCK_WORK_SOURCE = r"""
__device__ __forceinline__ void dsa_block_work(int* place, const int* count, int number, int blocks,
                                          int heads, int together, bool last_first) {
  const int some = number / (together * blocks) * together;
  const int left = min(together, heads - some);
  const int own = number % (together * blocks);
  place[0] = last_first ? blocks - 1 - own / left : own / left;
  place[1] = some + own % left;
  place[2] = count[place[0]];
}
"""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes for one model's dims, limited by registers.

    Attributes:
        forward_keys: keys per forward tile, either a group of key bits or half a group.
        joined: the forward stores a query's dims in one buffer and reuses it for the output.
        slots: buffers for slabs of 64 dims in the head sums; 0 to fetch whole heads.
        split: a separate program computes dV.
        stages: tiles of queries in the backward's shared memory.
    """

    forward_keys: int = KEYS
    joined: bool = False
    slots: int = 0
    split: bool = False
    stages: int = STAGES


_WIDE = Tiling(forward_keys=64, joined=True, slots=6, split=True, stages=1)
#: Tilings by ``Dims`` of DeepSeek-V3.2, GLM-5 and GLM-5.3.
TILINGS = {(128, 64, 128): Tiling(), (192, 64, 256): _WIDE, (256, 0, 256): _WIDE}


@dataclass(frozen=True)
class Dims:
    nope: int
    rope: int
    v: int

    def __post_init__(self):
        if (self.nope, self.rope, self.v) not in TILINGS:
            raise ValueError(
                f"dims must be {' or '.join(map(str, TILINGS))} (key without rope, rope, value), "
                f"got {(self.nope, self.rope, self.v)}: accumulators fill the registers, and "
                "others have no tiling; use another implementation"
            )

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    @classmethod
    def of_keys(cls, nope: int, rope: int) -> Self:
        for dims in TILINGS:
            if dims[:2] == (nope, rope):
                return cls(*dims)
        known = " or ".join(str(dims[:2]) for dims in TILINGS)
        raise ValueError(
            f"dims must be {known} (key without rope, rope), got {(nope, rope)}: others have no "
            "tiling; use another implementation"
        )

    @property
    def tiling(self) -> Tiling:
        return TILINGS[self.nope, self.rope, self.v]


@dataclass(frozen=True)
class BlockWork:
    """Work of a thread block: ``n`` tiles of the queries or keys from ``first`` on."""

    block: Any
    first: Any
    head: Any
    n: Any


@T.macro
def block_work(Count, number, heads, together, size, last_first, parts=1):
    work = T.alloc_local([3], "int32")
    blocks = Count.shape[0]
    call(
        "dsa_block_work",
        work.data,
        T.address_of(Count[0]),
        number,
        blocks,
        heads,
        together,
        last_first,
    )
    return BlockWork(work[0], work[0] * size, work[1], work[2] * parts)


def fetch(source, target, barrier):
    return T.tma_copy(source, target, barrier=barrier, leader_scope_threads=32)


def thread_row(tx):
    return tx // 32 * 16 + tx % 32 // 4
