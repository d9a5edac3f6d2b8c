"""Compressor pooling in Triton where a thread holds all positions of a group.

A tile is ``[groups, positions, channels]``. Channels are spread over the threads of a warp first,
then groups over the rest, so that the softmax needs no exchange between threads.

Backward: the softmax is computed again, which costs no traffic. The program of a group writes the
last ``d`` channels of its own rows and the first ``d`` of the previous group's rows; the first
``d`` channels of a group without a successor, which nobody would write, are zeroed by the group's
own program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_dsa.ops.compressor.triton.softmax import (
    LOWEST,
    PER_BATCH,
    exp_of_difference,
    indices,
)


@triton.jit
def _tile(base, stride, first, shift, column, use, other):
    """Rows ``first + shift`` in fp32, ``other`` where ``use`` is false.

    One product per group and one per position, not one per row. Each row is read once, so it is not
    kept in L1.
    """
    at = base + first * stride + column + shift * stride
    return tl.load(at, mask=use, other=other, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _bias(ape, column, inside, like, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr):
    """Scores of the positions, spread over the groups of ``like``.

    Sharding before they are loaded, or they would change their layout in shared memory.
    """
    at = tl.arange(0, BLOCK_P)[None, :, None] * WIDTH + column + tl.zeros_like(like).to(tl.int32)
    return tl.load(ape + at, mask=inside, other=0.0)


@triton.jit
def _softmax(u, s, v, t, OVERLAP: tl.constexpr):
    """Maximum, sum and weighted sum over positions, all ``[groups, channels]``."""
    # Unlike -inf, a number can be subtracted from -inf.
    top = tl.maximum(tl.max(s, 1), LOWEST)
    if OVERLAP:
        top = tl.maximum(top, tl.max(t, 1))
    p = exp_of_difference(s, top[:, None])
    total, pooled = tl.sum(p, 1), tl.sum(p * u, 1)
    if OVERLAP:
        p = exp_of_difference(t, top[:, None])
        total += tl.sum(p, 1)
        pooled += tl.sum(p * v, 1)
    return top, total, pooled


@triton.jit(do_not_specialize=PER_BATCH)
def pool_few(
    values, scores, ape, first_row, position, out,
    groups, row_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_G`` slots and ``BLOCK_D`` channels: no loop, so few registers."""
    # Neighbours in the grid read neighbouring channels of the same rows.
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    place = tl.arange(0, BLOCK_P)[None, :, None]
    inside = (place < RATIO) & (column < D)
    shift = place * row_step.to(tl.int64)
    slot = (tl.program_id(0) // parts * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
    first, at = indices(first_row, position, slot, groups)
    row = first.to(tl.int64)
    use = inside & (first >= 0)
    u = _tile(values, v_stride, row, shift, column + (WIDTH - D), use, 0.0)
    s = _tile(scores, s_stride, row, shift, column + (WIDTH - D), use, float("-inf"))
    s += _bias(ape, column + (WIDTH - D), inside, first, WIDTH, BLOCK_P)
    v, t = u, s
    if OVERLAP:
        row = row - RATIO * row_step.to(tl.int64)
        use = use & (at > 0)
        v = _tile(values, v_stride, row, shift, column, use, 0.0)
        t = _tile(scores, s_stride, row, shift, column, use, float("-inf"))
        t += _bias(ape, column, inside, first, WIDTH, BLOCK_P)
    _, total, pooled = _softmax(u, s, v, t, OVERLAP)
    pooled = pooled / tl.where(total == 0.0, 1.0, total)
    to = out + slot.to(tl.int64) * D + column
    mask = (slot < groups) & (column < D)
    tl.store(to, pooled[:, None].to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_gradients(
    dvalues, dscores, u, s, top, weight, pooled, first, shift, column, use, WIDTH: tl.constexpr
):
    """Write the gradients of a tile; return that of its scores in fp32."""
    dvalue = exp_of_difference(s, top) * weight
    dscore = dvalue * (u - pooled)
    to = first * WIDTH + column + shift * WIDTH
    tl.store(dvalues + to, dvalue.to(dvalues.dtype.element_ty), mask=use)
    tl.store(dscores + to, dscore.to(dscores.dtype.element_ty), mask=use)
    return dscore


@triton.jit(do_not_specialize=PER_BATCH)
def pool_few_backward(
    values, scores, ape, first_row, position, dout, dvalues, dscores, partial,
    groups, row_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``programs`` programs share the slots of ``BLOCK_D`` channels; each adds to ``dape`` once."""
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    program = tl.program_id(0) // parts
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    place = tl.arange(0, BLOCK_P)[None, :, None]
    inside = (place < RATIO) & (column < D)
    shift = place * row_step.to(tl.int64)
    group = RATIO * row_step.to(tl.int64)
    dape = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    dape_previous = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    own: tl.constexpr = WIDTH - D
    slot = (program * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
    first, at = indices(first_row, position, slot, groups)
    # Several blocks in flight (num_stages) spill registers and are no faster.
    for block in tl.range(program, tl.cdiv(groups, BLOCK_G), programs, num_stages=1):
        slot = (block * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
        row = first.to(tl.int64)
        use = inside & (first >= 0)
        gradient = tl.load(
            dout + slot.to(tl.int64) * D + column, mask=(first >= 0) & (column < D), other=0.0
        ).to(tl.float32)
        u = _tile(values, v_stride, row, shift, column + own, use, 0.0)
        s = _tile(scores, s_stride, row, shift, column + own, use, float("-inf"))
        s += _bias(ape, column + own, inside, first, WIDTH, BLOCK_P)
        v, t, use_previous = u, s, use
        if OVERLAP:
            use_previous = use & (at > 0)
            v = _tile(values, v_stride, row - group, shift, column, use_previous, 0.0)
            t = _tile(scores, s_stride, row - group, shift, column, use_previous, float("-inf"))
            t += _bias(ape, column, inside, first, WIDTH, BLOCK_P)
            after, at_after = indices(first_row, position, slot + 1, groups)
            last = (after < 0) | (at_after == 0)
        # All loads wait for these: read them a block ahead.
        first, at = indices(first_row, position, slot + programs * BLOCK_G, groups)
        top, total, pooled = _softmax(u, s, v, t, OVERLAP)
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        pooled = (pooled * scale)[:, None]
        top, weight = top[:, None], scale[:, None] * gradient
        dape += _store_gradients(
            dvalues, dscores, u, s, top, weight, pooled, row, shift, column + own, use, WIDTH
        )
        if OVERLAP:
            dape_previous += _store_gradients(
                dvalues, dscores, v, t, top, weight, pooled, row - group, shift, column,
                use_previous, WIDTH,
            )  # fmt: skip
            to_last = row * WIDTH + column + shift * WIDTH
            zero = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], dvalues.dtype.element_ty)
            tl.store(dvalues + to_last, zero, mask=use & last)
            tl.store(dscores + to_last, zero, mask=use & last)
    place = tl.arange(0, BLOCK_P)
    to_partial = partial + (program * RATIO + place)[:, None] * WIDTH + channel[None, :]
    mask = (place < RATIO)[:, None] & (channel < D)[None, :]
    tl.store(to_partial + (WIDTH - D), tl.sum(dape, 0), mask=mask)
    if OVERLAP:
        tl.store(to_partial, tl.sum(dape_previous, 0), mask=mask)
