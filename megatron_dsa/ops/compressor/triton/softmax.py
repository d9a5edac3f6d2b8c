"""What the Triton kernels for few and for many positions share."""

from __future__ import annotations

import triton
import triton.language as tl

#: Scores start the running maximum here: unlike -inf it can be subtracted from -inf,
#: and unlike the lowest number it can be multiplied by log2(e).
LOWEST = tl.constexpr(-1.0e38)
_LOG2_E = tl.constexpr(1.4426950408889634)

# Sizes that follow the batch, and slices of index tensors, must not compile kernels again.
PER_BATCH = ["first_row", "position", "groups", "row_step", "programs", "parts"]


@triton.jit
def exp_of_difference(x, y):
    """``exp(x - y)`` for a ``y`` that many ``x`` share: a multiplication and addition, and exp2.

    ``tl.exp`` takes three more instructions to keep denormal results. Rounding grows with ``y``: if
    ``x`` may be :data:`LOWEST`, take :func:`exp_of`.
    """
    return tl.exp2(x * _LOG2_E - y * _LOG2_E)


@triton.jit
def exp_of(x):
    """``exp(x)``, exactly 1 for 0."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def indices(first_row, position, slot, groups):
    """First rows of slots (-1: no group), and 1 where a previous group is, else 0.

    As int32: a loop that reads them a turn ahead keeps them in registers.
    """
    first = tl.load(first_row + slot, mask=slot < groups, other=-1)
    at = tl.load(position + slot, mask=slot < groups, other=0)
    return first, (at > 0).to(tl.int32)
