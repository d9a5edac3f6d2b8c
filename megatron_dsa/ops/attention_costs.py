"""Costs of sparse and of masked dense attention to selected keys.

Sparse attention computes the selected pairs of a query and a key, masked dense attention all
visible ones, each for less: the sequence length decides. Under context parallelism both gather
latents, and masked dense attention expands all of them to keys and values on every rank.
"""

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise

#: Picoseconds per pair and head of forward and backward on one H200 with the dims of DeepSeek-V3.2,
#: in bf16, and of the teacher of all queries: ``docs/kernels/masked_attention.md``. Layers of 8k to
#: 12k tokens are within 6 % of the sum; GLM-5's dims within 4 % of it in proportion.
MASKED_PS, TEACHER_PS = 4.6, 0.7
#: Likewise by heads: fewer than 64 do not fill the tiles of the kernels. With 16 it depends on how
#: much lists overlap: 29 to 66, in layers with random lists 41 at 8k tokens, 54 at 16k, 63 at 32k.
#: The teacher is a by-product of the backward: a share of the queries hardly costs less.
SPARSE_PS = {16: 46.0, 32: 30.0, 64: 17.9}
#: Operations per picosecond of large products in bf16, by which the up projection of other ranks'
#: latents is counted: an estimate from the rate of products on an H200, not measured in a layer.
PRODUCT_RATE = 600


@dataclass(frozen=True)
class PairDims:
    """Dims of a key and of a value together, which the products of a pair grow with.

    Attributes:
        masked: of a head in plain MLA.
        sparse: of a latent.
    """

    masked: int
    sparse: int


#: Dims of DeepSeek-V3.2, with which the costs were measured.
MEASURED_DIMS = PairDims(192 + 128, 576 + 512)


@dataclass(frozen=True)
class AttentionCosts:
    """Time per pair of a query and a key and per head, in picoseconds.

    Attributes:
        masked: of a visible pair in masked dense attention.
        sparse: of a selected pair in sparse attention.
        expansion: per query token instead, of the keys and values that masked dense attention makes
            of the latents of other context-parallel ranks.
    """

    masked: float
    sparse: float
    expansion: float = 0.0

    def masked_is_cheaper(self, length: int, topk: int) -> bool:
        """Return whether masked dense attention is faster for sequences of ``length`` tokens."""
        masked = self.masked * _pairs(length, length) + self.expansion * length
        return masked < self.sparse * _pairs(length, topk)

    def crossover(self, topk: int) -> int:
        """Return the longest sequence for which masked dense attention is cheaper, 0 if none."""
        # From `topk` tokens on, one more costs sparse attention always the same and masked dense
        # attention ever more: the difference falls up to this length and grows from there on.
        lead = math.ceil((self.sparse * topk - self.expansion) / self.masked) - 1
        best = max(topk, lead)
        if not self.masked_is_cheaper(best, topk):
            return 0
        # At the upper end half the square costs as much as if all queries selected `topk` keys.
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
    """Return the costs on an H200.

    Args:
        heads: of a query on a rank. Between the entries of :data:`SPARSE_PS` the cost is
            interpolated, linear in the logarithm of the heads.
        interleaved: sequences whose tokens alternate, as in unpacked batches of several. Every tile
            of masked dense attention holds all of them, so all are computed against all.
        dims: of keys and values. Costs of others than those measured are taken to be proportional.
        expansion: see :class:`AttentionCosts`; with ``n`` context-parallel ranks ``n - 1`` times
            :func:`expansion_ps`.
        taught: share of the queries that the indexer is trained on.
    """
    masked = (MASKED_PS + taught * TEACHER_PS) * dims.masked / MEASURED_DIMS.masked
    sparse = _sparse_ps(heads) * dims.sparse / MEASURED_DIMS.sparse
    return AttentionCosts(masked * interleaved, sparse, expansion)


def expansion_ps(latent: int, key_and_value: int) -> float:
    """Return picoseconds per token and head to expand a latent to key and value, without rope.

    Three products: one forward, and for the gradients of latent and weight.
    """
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
