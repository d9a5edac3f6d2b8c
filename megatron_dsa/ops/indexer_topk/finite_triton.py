"""Whether index scores can be NaN or infinite, in Triton: two launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

#: Programs, and elements that one looks at in a step.
_PROGRAMS, _BLOCK = 512, 4096
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _largest(x, unseen, width, count, BLOCK: tl.constexpr):
    """Return the bits of the largest fp32 magnitude of this program's share; NaN is the largest.

    Bits of magnitudes are ordered as these are.
    """
    largest = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for begin in range(first, count, tl.num_programs(0) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < count
        if unseen is not None:
            inside &= tl.load(unseen + place // width, mask=inside, other=1) == 0
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & _MAGNITUDE)
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["q_width", "k_width", "w_width", "q_count", "k_count", "w_count"])
def _magnitudes(
    q, k, weights, unseen_queries, unseen_keys, out, q_width, k_width, w_width, q_count, k_count,
    w_count, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out [3, programs]``: the largest magnitudes of each program."""
    programs = tl.num_programs(0)
    at = out + tl.program_id(0)
    tl.store(at, _largest(q, unseen_queries, q_width, q_count, BLOCK))
    tl.store(at + programs, _largest(k, unseen_keys, k_width, k_count, BLOCK))
    tl.store(at + 2 * programs, _largest(weights, unseen_queries, w_width, w_count, BLOCK))


@triton.jit(do_not_specialize=["limit"])
def _fit(largest, holds, limit, PROGRAMS: tl.constexpr):
    """One program. The products of a head are summed before they are weighted: both must fit."""
    place = tl.arange(0, PROGRAMS)
    q = tl.max(tl.load(largest + place), 0).to(tl.float32, bitcast=True)
    k = tl.max(tl.load(largest + PROGRAMS + place), 0).to(tl.float32, bitcast=True)
    weights = tl.max(tl.load(largest + 2 * PROGRAMS + place), 0).to(tl.float32, bitcast=True)
    products = q * k
    # False for NaN.
    tl.store(holds, products + products * weights < limit)


def sums_fit(
    tensors: Sequence[torch.Tensor], unseen: Sequence[torch.Tensor | None], limit: float
) -> torch.Tensor:
    """Return a bool scalar: whether ``|q k| + |q k weights|`` of the largest elements is small.

    Args:
        tensors: q, k and weights, one entry per token, 16-bit or fp32, not empty.
        unseen: bool, which tokens of each to leave out, or ``None``; q and weights have the same.
        limit: what the sum must be below.
    """
    q, k, weights = (x.contiguous() for x in tensors)
    largest = q.new_empty(3, _PROGRAMS, dtype=torch.int32)
    holds = q.new_empty((), dtype=torch.bool)
    widths = (x.numel() // len(x) for x in (q, k, weights))
    _magnitudes[(_PROGRAMS,)](
        q, k, weights, unseen[0], unseen[1], largest, *widths, q.numel(), k.numel(),
        weights.numel(), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _fit[(1,)](largest, holds, limit, PROGRAMS=_PROGRAMS, num_warps=4)
    return holds
