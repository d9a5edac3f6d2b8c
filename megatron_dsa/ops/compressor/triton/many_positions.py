"""Compressor pooling in Triton where threads share the positions of a group.

Forward: a tile holds all positions of one group as ``[slices, positions, channels]``. A thread
pools the positions of its slice on its own; only maximum, sum and mean of slices are exchanged.

Backward: the forward leaves the logarithm of every softmax's sum and its mean in fp32, so that
positions need nothing from each other. A program keeps ``ape`` and its gradient for some positions
and channels in registers and visits group after group. With overlap the first ``d`` channels of a
group's rows belong to the softmax of the next slot; a group without a successor gets zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_dsa.ops.compressor.triton.softmax import (
    LOWEST,
    PER_BATCH,
    exp_of,
    exp_of_difference,
    indices,
)


@triton.jit
def _bias(
    ape, place, column, HALF: tl.constexpr,
    D: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scores of places in a group, for the channels from ``HALF`` on."""
    use = (place < RATIO) & (column < D)
    return tl.load(ape + place * WIDTH + column + HALF, mask=use, other=0.0)


@triton.jit
def _rows(base, stride, row, column, use, other):
    """Rows, ``other`` where ``use`` is false; each is read once, so not kept in L1."""
    return tl.load(base + row * stride + column, mask=use, other=other, cache_modifier=".cg")


@triton.jit
def _fold(top, total, pooled, u, s):
    """Add positions to a softmax, all ``[slices, channels]``."""
    new = tl.maximum(top, tl.max(s, 1))
    p = exp_of_difference(s, new[:, None])
    shrink = exp_of(top - new)
    return new, total * shrink + tl.sum(p, 1), pooled * shrink + tl.sum(p * u, 1)


@triton.jit(do_not_specialize=PER_BATCH)
def pool_many(
    values, scores, ape, first_row, position, out, log_sum, mean,
    groups, row_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``programs`` programs share the slots of ``BLOCK_D`` channels."""
    # Neighbours in the grid read neighbouring channels of the same rows.
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    program = tl.program_id(0) // parts
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    own: tl.constexpr = WIDTH - D
    tile: tl.constexpr = SLICES * BLOCK_P
    step = row_step.to(tl.int64)
    place = tl.arange(0, SLICES)[:, None, None] + SLICES * tl.arange(0, BLOCK_P)[None, :, None]
    first, at = indices(first_row, position, program, groups)
    # Neither several slots in flight (num_stages) nor ape in registers is faster: both take the
    # room of other programs.
    for slot in tl.range(program, groups, programs, num_stages=1):
        top = tl.full([SLICES, BLOCK_D], LOWEST, tl.float32)
        total = tl.zeros([SLICES, BLOCK_D], tl.float32)
        pooled = tl.zeros([SLICES, BLOCK_D], tl.float32)
        for start in tl.static_range(0, RATIO, tile):
            here = start + place
            use = (here < RATIO) & (column < D) & (first >= 0)
            row = first.to(tl.int64) + here * step
            u = _rows(values, v_stride, row, column + own, use, 0.0)
            s = _rows(scores, s_stride, row, column + own, use, float("-inf"))
            s = s.to(tl.float32) + _bias(ape, here, column, own, D, RATIO, WIDTH)
            top, total, pooled = _fold(top, total, pooled, u.to(tl.float32), s)
            if OVERLAP:
                use = use & (at > 0)
                row = row - RATIO * step
                u = _rows(values, v_stride, row, column, use, 0.0)
                s = _rows(scores, s_stride, row, column, use, float("-inf"))
                s = s.to(tl.float32) + _bias(ape, here, column, 0, D, RATIO, WIDTH)
                top, total, pooled = _fold(top, total, pooled, u.to(tl.float32), s)
        # All loads wait for these: read them a slot ahead.
        first, at = indices(first_row, position, slot + programs, groups)
        best = tl.max(top, 0)
        shrink = exp_of(top - best[None, :])
        sums = tl.sum(total * shrink, 0)
        sums = tl.where(sums == 0.0, 1.0, sums)
        average = tl.sum(pooled * shrink, 0) / sums
        to = tl.full([BLOCK_D], slot, tl.int64) * D + channel
        tl.store(out + to, average.to(out.dtype.element_ty), mask=channel < D)
        tl.store(log_sum + to, best + tl.log(sums), mask=channel < D)
        tl.store(mean + to, average, mask=channel < D)


@triton.jit(do_not_specialize=PER_BATCH)
def pool_many_backward(
    values, scores, ape, first_row, position, dout, log_sum, mean, dvalues, dscores, partial,
    groups, row_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``programs`` programs share the slots of ``BLOCK_D`` channels and ``BLOCK_P`` positions.

    ``parts``: blocks of channels of one half.
    """
    halves: tl.constexpr = 2 if OVERLAP else 1
    chunks: tl.constexpr = (RATIO + BLOCK_P - 1) // BLOCK_P
    # Neighbours in the grid read neighbouring channels of the same rows.
    half = tl.program_id(0) // parts % halves
    chunk = tl.program_id(0) // (parts * halves) % chunks
    program = tl.program_id(0) // (parts * halves * chunks)
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    use_channel = channel < D
    column = tl.max_contiguous(channel, VEC)[None, :] + half * D
    place = (chunk * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    inside = (place < RATIO) & use_channel[None, :]
    shift = place * row_step.to(tl.int64)
    bias = tl.load(ape + place * WIDTH + column, mask=inside, other=0.0)
    dape = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    # The softmax of the first half is that of the next slot, if it has a previous group.
    behind = halves - 1 - half
    first, _ = indices(first_row, position, program, groups)
    first_behind, at_behind = indices(first_row, position, program + behind, groups)
    for slot in tl.range(program, groups, programs, num_stages=STAGES):
        if STAGES > 1:
            first, _ = indices(first_row, position, slot, groups)
            first_behind, at_behind = indices(first_row, position, slot + behind, groups)
        use = inside & (first >= 0)
        row = first.to(tl.int64) + shift
        pools = (first_behind >= 0) & ((behind == 0) | (at_behind > 0))
        source = tl.full([BLOCK_D], slot + behind, tl.int64) * D + channel
        gradient = tl.load(dout + source, mask=use_channel & pools, other=0.0).to(tl.float32)
        log = tl.load(log_sum + source, mask=use_channel & pools, other=0.0)
        average = tl.load(mean + source, mask=use_channel & pools, other=0.0)
        u = _rows(values, v_stride, row, column, use & pools, 0.0)
        s = _rows(scores, s_stride, row, column, use & pools, float("-inf"))
        if STAGES == 1:
            # All loads wait for these: read them a slot ahead.
            first, _ = indices(first_row, position, slot + programs, groups)
            behind_next = slot + programs + behind
            first_behind, at_behind = indices(first_row, position, behind_next, groups)
        dvalue = exp_of_difference(s.to(tl.float32) + bias, log[None, :]) * gradient[None, :]
        dscore = dvalue * (u.to(tl.float32) - average[None, :])
        to = row * WIDTH + column
        tl.store(dvalues + to, dvalue.to(dvalues.dtype.element_ty), mask=use)
        tl.store(dscores + to, dscore.to(dscores.dtype.element_ty), mask=use)
        dape += dscore
    tl.store(partial + (program * RATIO + place) * WIDTH + column, dape, mask=inside)
