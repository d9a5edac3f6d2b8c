"""The best columns of rows of index scores on Hopper: exact, in order, scores read once.

A thread block selects from one row; several of them are on an SM, so that some fetch scores while
others count. :mod:`.selection_stream` describes the algorithm, :mod:`.selection_refine` how the
best candidates are found. Rows may be of any length, and any number of their scores may be equal.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
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
    """How a thread block works.

    Attributes:
        threads: of a block.
        candidates: that shared memory has room for.
        sectors: of 8 scores that a thread reads for the sample.
        blocks: on an SM; limits a thread's registers.
    """

    threads: int
    candidates: int
    sectors: int
    blocks: int

    @property
    def words(self) -> int:
        """Size of the shared memory: keys and columns, then bins or places, at most 64 counts."""
        return 2 * self.candidates + max(BINS + self.threads, self.topk // 2) + 64

    @property
    def topk(self) -> int:
        """Keys that can be selected: as many candidates as fit beside a chunk of scores."""
        return self.candidates - 4 * VECTORS * self.threads


TILINGS = {
    "narrow": Tiling(threads=128, candidates=4096, sectors=1, blocks=6),
    "wide": Tiling(threads=256, candidates=6144, sectors=2, blocks=4),
    "large": Tiling(threads=256, candidates=8192, sectors=2, blocks=3),
}
#: Rows up to this long are narrow.
NARROW = 16384
#: Keys that can be selected.
TOPK = TILINGS["large"].topk


def build(name: str):
    """Return the TileLang program with the tiling of that name.

    Its arguments (sizes are dynamic):
        Scores ``[rows, width]`` fp32, rows with any stride; Start, End ``[rows]`` int32,
        ``0 <= Start <= End <= width``: the columns that a row sees; Out ``[rows, topk]`` int32,
        contiguous: columns of the best scores, ascending, then -1; wanted: how many candidates to
        aim at (:func:`aim`).
    """
    tiling = TILINGS[name]
    rows, width, stride, topk = T.dynamic("rows, width, stride, topk")
    constants = (tiling.threads, tiling.candidates, tiling.sectors, VECTORS, 4 * tiling.words)

    @T.prim_func
    def best_columns(
        Scores: T.StridedTensor([rows, width], (stride, 1), "float32"),
        Start: T.Tensor([rows], "int32"),
        End: T.Tensor([rows], "int32"),
        Out: T.Tensor([rows, topk], "int32"),
        wanted: T.int32,
    ):
        with T.Kernel(rows, threads=tiling.threads) as block:
            T.annotate_min_blocks_per_sm(tiling.blocks)
            T.import_source(SOURCE)
            shared = T.alloc_shared([tiling.words], "uint32")
            # Later rows as a rule see more: they begin first, so that none of them is the last.
            row = rows - 1 - block
            T.call_extern(
                "handle",
                f"dsa_select<{', '.join(map(str, constants))}>",
                T.address_of(Scores[row, 0]),
                T.address_of(Start[row]),
                T.address_of(End[row]),
                T.address_of(Out[row, 0]),
                topk,
                wanted,
                T.address_of(shared[0]),
            )

    return best_columns


def tiling_for(width: int, topk: int) -> str:
    """Return the name of the tiling for rows of ``width`` scores."""
    name = "narrow" if width <= NARROW else "wide"
    return name if topk <= TILINGS[name].topk else "large"


def aim(name: str, topk: int) -> int:
    """Return how many candidates a sample should be asked for.

    About as many standard errors of the sample lie between it and ``topk``, below which the row is
    read again, as between it and what there is room for, above which some are dropped on the way.
    """
    return math.isqrt(topk * TILINGS[name].candidates)


compiled = compiler(build)


def kernel_for(width: int, topk: int):
    """Return what :func:`compiled` does for the tiling of :func:`tiling_for`.

    The first call compiles the tiling for rows of other widths, too: no later step waits for it.
    """
    for other in (NARROW, NARROW + 1):
        compiled(tiling_for(other, topk))
    return compiled(tiling_for(width, topk))
