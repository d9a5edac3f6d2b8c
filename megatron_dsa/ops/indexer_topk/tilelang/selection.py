"""Exact, ordered selection of the best index scores on Hopper, reading scores once.

A thread block selects for one query; several blocks share an SM to overlap fetches and counting.
"""

import math
from dataclasses import dataclass

from tilelang import language as T

from megatron_dsa.ops.hopper import prefix_sums
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.indexer_topk.tilelang import selection_refine, selection_stream
from megatron_dsa.ops.indexer_topk.tilelang.selection_refine import BINS
from megatron_dsa.ops.indexer_topk.tilelang.selection_stream import VECTORS

SOURCE = prefix_sums.SOURCE + selection_refine.SOURCE + selection_stream.SOURCE


@dataclass(frozen=True)
class Tiling:
    """Limits of a thread block that selects keys.

    Attributes:
        candidates: capacity of shared memory in candidates.
        sectors: sectors of 8 scores that a thread samples.
        blocks: thread blocks per SM, which limit a thread's registers.
    """

    threads: int
    candidates: int
    sectors: int
    blocks: int

    @property
    def words(self) -> int:
        return 2 * self.candidates + max(BINS + self.threads, self.topk // 2) + 64

    @property
    def topk(self) -> int:
        """Maximum selected keys, which share the candidates' memory with a chunk of scores."""
        return self.candidates - 4 * VECTORS * self.threads


TILINGS = {
    "narrow": Tiling(threads=128, candidates=4096, sectors=1, blocks=6),
    "wide": Tiling(threads=256, candidates=6144, sectors=2, blocks=4),
    "large": Tiling(threads=256, candidates=8192, sectors=2, blocks=3),
}
NARROW = 16384
TOPK = TILINGS["large"].topk


def build(name: str):
    """Return the TileLang program with the tiling ``name``.

    Columns from Start to End are visible. Out gets ascending columns of the best scores, then -1;
    ``wanted`` is the result of :func:`aim`.
    """
    tiling = TILINGS[name]
    queries, width, stride, topk = T.dynamic("queries, width, stride, topk")
    constants = (tiling.threads, tiling.candidates, tiling.sectors, VECTORS, 4 * tiling.words)

    @T.prim_func
    def best_columns(
        Scores: T.StridedTensor([queries, width], (stride, 1), "float32"),
        Start: T.Tensor([queries], "int32"),
        End: T.Tensor([queries], "int32"),
        Out: T.Tensor([queries, topk], "int32"),
        wanted: T.int32,
    ):
        with T.Kernel(queries, threads=tiling.threads) as block:
            T.annotate_min_blocks_per_sm(tiling.blocks)
            T.import_source(SOURCE)
            shared = T.alloc_shared([tiling.words], "uint32")
            # Start with later queries, which usually have more visible keys.
            query = queries - 1 - block
            T.call_extern(
                "handle",
                f"dsa_select<{', '.join(map(str, constants))}>",
                T.address_of(Scores[query, 0]),
                T.address_of(Start[query]),
                T.address_of(End[query]),
                T.address_of(Out[query, 0]),
                topk,
                wanted,
                T.address_of(shared[0]),
            )

    return best_columns


def tiling_for(width: int, topk: int) -> str:
    name = "narrow" if width <= NARROW else "wide"
    return name if topk <= TILINGS[name].topk else "large"


def aim(name: str, topk: int) -> int:
    """Return the number of candidates to expect above the sampled floor.

    The geometric mean of ``topk`` and the capacity balances the risks of too few candidates, which
    require a second read, and of more than fit.
    """
    return math.isqrt(topk * TILINGS[name].candidates)


compiled = compiler(build)


def kernel_for(width: int, topk: int):
    """Return the kernel; compile it for all widths now instead of in later steps."""
    for other in (NARROW, NARROW + 1):
        compiled(tiling_for(other, topk))
    return compiled(tiling_for(width, topk))
