"""Cost estimates of sparse attention and masked dense attention.

Sparse attention computes only selected pairs; masked dense attention computes all visible pairs,
each at a lower cost, and under context parallelism expands gathered latents on every rank.
"""

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise

#: Picoseconds per query-key pair and head of attention, and of the teacher of all queries, on one
#: H200 in bf16 with DeepSeek-V3.2's dims (``docs/kernels/masked_attention.md``).
MASKED_PS, TEACHER_PS = 4.6, 0.7
#: Picoseconds per query-key pair and head, by number of heads: fewer than 64 heads do not fill a
#: tile. The backward also yields the teacher, so teaching fewer queries saves little.
SPARSE_PS = {16: 46.0, 32: 30.0, 64: 17.9}
#: Floating-point operations per picosecond of large bf16 products (an estimate).
PRODUCT_RATE = 600


@dataclass(frozen=True)
class PairDims:
    """Key dims plus value dims, to which the cost of a query-key pair is proportional.

    ``masked``: dims of a head in plain MLA. ``sparse``: dims of a latent.
    """

    masked: int
    sparse: int


#: Key and value dims of DeepSeek-V3.2.
MEASURED_DIMS = PairDims(192 + 128, 576 + 512)


@dataclass(frozen=True)
class AttentionCosts:
    """Attention costs in picoseconds per head.

    Attributes:
        masked: cost of a visible pair of query and key.
        sparse: cost of a selected pair.
        expansion: cost per query token to expand other context-parallel ranks' latents.
    """

    masked: float
    sparse: float
    expansion: float = 0.0

    def masked_is_cheaper(self, length: int, topk: int) -> bool:
        masked = self.masked * _pairs(length, length) + self.expansion * length
        return masked < self.sparse * _pairs(length, topk)

    def crossover(self, topk: int) -> int:
        """Return the longest sequence for which masked is cheaper than sparse attention, or 0."""
        # From `topk` tokens on, sparse attention has a constant cost per token, masked attention a
        # rising cost: `lead` is the last token at which masked attention is cheaper.
        lead = math.ceil((self.sparse * topk - self.expansion) / self.masked) - 1
        best = max(topk, lead)
        if not self.masked_is_cheaper(best, topk):
            return 0
        # Upper bound: length / 2 visible keys per query cost as much as `topk` selected keys.
        lengths = range(best, math.ceil(2 * topk * self.sparse / self.masked) + 1)
        return lengths[
            bisect.bisect_left(lengths, True, key=lambda n: not self.masked_is_cheaper(n, topk)) - 1
        ]


def attention_costs(
    heads: int,
    interleaved: int = 1,
    dims: PairDims = MEASURED_DIMS,
    expansion: float = 0.0,
    taught: float = 1.0,
) -> AttentionCosts:
    """Return the attention costs on an H200.

    Args:
        heads: local query heads, interpolated in :data:`SPARSE_PS`.
        interleaved: sequences whose tokens alternate, as in unpacked batches; masked dense
            attention computes the pairs of all sequences.
        expansion: ``n - 1`` times :func:`expansion_ps` for ``n`` context-parallel ranks.
        taught: share of the queries that train the indexer.
    """
    masked = (MASKED_PS + taught * TEACHER_PS) * dims.masked / MEASURED_DIMS.masked
    sparse = _sparse_ps(heads) * dims.sparse / MEASURED_DIMS.sparse
    return AttentionCosts(masked * interleaved, sparse, expansion)


def expansion_ps(latent: int, key_and_value: int) -> float:
    return 3 * 2 * latent * key_and_value / PRODUCT_RATE


def _sparse_ps(heads: int) -> float:
    known = sorted(SPARSE_PS)
    heads = min(max(heads, known[0]), known[-1])
    for low, high in pairwise(known):
        if heads <= high:
            share = math.log2(heads / low) / math.log2(high / low)
            return (1 - share) * SPARSE_PS[low] + share * SPARSE_PS[high]
    raise AssertionError("heads lie within the table")


def _pairs(length: int, limit: int) -> int:
    rising = min(length, limit)
    return rising * (rising + 1) // 2 + (length - rising) * rising
