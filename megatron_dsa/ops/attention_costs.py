"""What attention to selected keys costs, by sparse attention and by masked dense attention.

Sparse attention computes the pairs of a query and a key that are selected, masked dense attention
all visible ones, each for less. So the sequence length decides which is the faster one.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise

#: Picoseconds per pair and head of forward, backward and teacher together, on one H200 with the
#: dims of DeepSeek-V3.2, in bf16: ``docs/kernels/masked_attention.md``.
MASKED_PS = 5.3
#: Likewise by heads: fewer than 64 do not fill the tiles of the kernels.
SPARSE_PS = {16: 40.0, 32: 30.0, 64: 17.9}


@dataclass(frozen=True)
class PairDims:
    """Dims of a key and of a value together, which the products of a pair grow with.

    Attributes:
        masked: of a head in plain MLA.
        sparse: of a latent.
    """

    masked: int
    sparse: int


#: Those of DeepSeek-V3.2, of which the costs were measured.
MEASURED_DIMS = PairDims(192 + 128, 576 + 512)


@dataclass(frozen=True)
class AttentionCosts:
    """Time per pair of a query and a key and per head, in picoseconds.

    Attributes:
        masked: of a visible pair in masked dense attention.
        sparse: of a selected pair in sparse attention.
    """

    masked: float
    sparse: float

    def masked_is_cheaper(self, length: int, topk: int) -> bool:
        """Whether masked dense attention is the faster one.

        Args:
            length: tokens of a sequence.
            topk: keys that a query selects, if it sees as many.
        """
        return self.masked * _pairs(length, length) < self.sparse * _pairs(length, topk)

    def crossover(self, topk: int) -> int:
        """Return the longest sequence for which masked dense attention is cheaper, 0 if none."""
        if self.masked >= self.sparse:
            return 0
        # At the upper end half the square costs as much as if all queries selected `topk` keys.
        lengths = range(topk, math.ceil(2 * topk * self.sparse / self.masked) + 1)
        return lengths[
            bisect.bisect_left(lengths, True, key=lambda n: not self.masked_is_cheaper(n, topk)) - 1
        ]


def attention_costs(
    heads: int, interleaved: int = 1, dims: PairDims = MEASURED_DIMS
) -> AttentionCosts:
    """Return the costs on an H200.

    Args:
        heads: of a query on a rank. Between the entries of :data:`SPARSE_PS` the cost is
            interpolated, linear in the logarithm of the heads.
        interleaved: sequences whose tokens alternate, as in unpacked batches of several. No tile of
            masked dense attention holds one of them alone, so all are computed against all.
        dims: of keys and values. Costs of others than those measured are taken to be proportional.
    """
    masked = MASKED_PS * dims.masked / MEASURED_DIMS.masked
    sparse = _sparse_ps(heads) * dims.sparse / MEASURED_DIMS.sparse
    return AttentionCosts(masked * interleaved, sparse)


def _sparse_ps(heads: int) -> float:
    known = sorted(SPARSE_PS)
    heads = min(max(heads, known[0]), known[-1])
    for low, high in pairwise(known):
        if heads <= high:
            share = math.log2(heads / low) / math.log2(high / low)
            return (1 - share) * SPARSE_PS[low] + share * SPARSE_PS[high]
    raise AssertionError("heads lie within the table")


def _pairs(length: int, limit: int) -> int:
    """Return the pairs of a sequence whose queries have at most ``limit`` keys."""
    rising = min(length, limit)
    return rising * (rising + 1) // 2 + (length - rising) * rising
