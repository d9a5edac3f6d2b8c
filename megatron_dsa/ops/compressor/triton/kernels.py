"""Triton kernels of compressor pooling.

A tile ``[groups, positions, channels]`` holds all positions of its groups; threads are assigned to
channels first.

The backward recomputes the softmax without extra traffic. A group's program writes the gradients of
its tokens' last ``d`` channels and of the previous group's first ``d``; if no group follows, it
zeros its tokens' first ``d``.
"""

import triton
import triton.language as tl

#: Initial maximum, finite even times log2(e), so that -inf minus the maximum is not NaN.
_LOWEST = tl.constexpr(-1.0e38)
_LOG2_E = tl.constexpr(1.4426950408889634)

# Varying sizes must not trigger recompilation.
_PER_BATCH = ["first_token", "position", "groups", "token_step", "programs", "parts"]


@triton.jit
def _exp_of_difference(x, y):
    # tl.exp spends three extra instructions on denormals.
    return tl.exp2(x * _LOG2_E - y * _LOG2_E)


@triton.jit
def _indices(first_token, position, slot, groups):
    """Return each slot's first token (or -1), and 1 or 0 for a preceding group.

    Prefetched int32 values stay in registers.
    """
    first = tl.load(first_token + slot, mask=slot < groups, other=-1)
    at = tl.load(position + slot, mask=slot < groups, other=0)
    return first, (at > 0).to(tl.int32)


@triton.jit
def _tile(base, stride, first, shift, column, use, other):
    at = base + first * stride + column + shift * stride
    return tl.load(at, mask=use, other=other, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _bias(ape, column, inside, like, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr):
    # Broadcast before the load: a loaded tile would change layout through shared memory.
    at = tl.arange(0, BLOCK_P)[None, :, None] * WIDTH + column + tl.zeros_like(like).to(tl.int32)
    return tl.load(ape + at, mask=inside, other=0.0)


@triton.jit
def _softmax(u, s, v, t, OVERLAP: tl.constexpr):
    top = tl.maximum(tl.max(s, 1), _LOWEST)
    if OVERLAP:
        top = tl.maximum(top, tl.max(t, 1))
    p = _exp_of_difference(s, top[:, None])
    total, pooled = tl.sum(p, 1), tl.sum(p * u, 1)
    if OVERLAP:
        p = _exp_of_difference(t, top[:, None])
        total += tl.sum(p, 1)
        pooled += tl.sum(p * v, 1)
    return top, total, pooled


@triton.jit(do_not_specialize=_PER_BATCH)
def pool(
    values, scores, ape, first_token, position, out,
    groups, token_step, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    offset = tl.arange(0, BLOCK_P)[None, :, None]
    inside = (offset < RATIO) & (column < D)
    shift = offset * token_step.to(tl.int64)
    slot = (tl.program_id(0) // parts * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
    first, at = _indices(first_token, position, slot, groups)
    token = first.to(tl.int64)
    use = inside & (first >= 0)
    u = _tile(values, v_stride, token, shift, column + (WIDTH - D), use, 0.0)
    s = _tile(scores, s_stride, token, shift, column + (WIDTH - D), use, float("-inf"))
    s += _bias(ape, column + (WIDTH - D), inside, first, WIDTH, BLOCK_P)
    v, t = u, s
    if OVERLAP:
        token = token - RATIO * token_step.to(tl.int64)
        use = use & (at > 0)
        v = _tile(values, v_stride, token, shift, column, use, 0.0)
        t = _tile(scores, s_stride, token, shift, column, use, float("-inf"))
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
    dvalue = _exp_of_difference(s, top) * weight
    dscore = dvalue * (u - pooled)
    to = first * WIDTH + column + shift * WIDTH
    tl.store(dvalues + to, dvalue.to(dvalues.dtype.element_ty), mask=use)
    tl.store(dscores + to, dscore.to(dscores.dtype.element_ty), mask=use)
    return dscore


@triton.jit(do_not_specialize=_PER_BATCH)
def pool_backward(
    values, scores, ape, first_token, position, dout, dvalues, dscores, partial,
    groups, token_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    program = tl.program_id(0) // parts
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    offset = tl.arange(0, BLOCK_P)[None, :, None]
    inside = (offset < RATIO) & (column < D)
    shift = offset * token_step.to(tl.int64)
    group = RATIO * token_step.to(tl.int64)
    dape = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    dape_previous = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    current: tl.constexpr = WIDTH - D
    slot = (program * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
    first, at = _indices(first_token, position, slot, groups)
    # Larger num_stages spill registers and are no faster.
    for block in tl.range(program, tl.cdiv(groups, BLOCK_G), programs, num_stages=1):
        slot = (block * BLOCK_G + tl.arange(0, BLOCK_G))[:, None, None]
        token = first.to(tl.int64)
        use = inside & (first >= 0)
        gradient = tl.load(
            dout + slot.to(tl.int64) * D + column, mask=(first >= 0) & (column < D), other=0.0
        ).to(tl.float32)
        u = _tile(values, v_stride, token, shift, column + current, use, 0.0)
        s = _tile(scores, s_stride, token, shift, column + current, use, float("-inf"))
        s += _bias(ape, column + current, inside, first, WIDTH, BLOCK_P)
        v, t, use_previous = u, s, use
        if OVERLAP:
            use_previous = use & (at > 0)
            v = _tile(values, v_stride, token - group, shift, column, use_previous, 0.0)
            t = _tile(scores, s_stride, token - group, shift, column, use_previous, float("-inf"))
            t += _bias(ape, column, inside, first, WIDTH, BLOCK_P)
            after, at_after = _indices(first_token, position, slot + 1, groups)
            last = (after < 0) | (at_after == 0)
        # Prefetch the next group indices, on which all loads wait.
        first, at = _indices(first_token, position, slot + programs * BLOCK_G, groups)
        top, total, pooled = _softmax(u, s, v, t, OVERLAP)
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        pooled = (pooled * scale)[:, None]
        top, weight = top[:, None], scale[:, None] * gradient
        dape += _store_gradients(
            dvalues, dscores, u, s, top, weight, pooled, token, shift, column + current, use, WIDTH
        )
        if OVERLAP:
            dape_previous += _store_gradients(
                dvalues, dscores, v, t, top, weight, pooled, token - group, shift, column,
                use_previous, WIDTH,
            )  # fmt: skip
            to_last = token * WIDTH + column + shift * WIDTH
            zero = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], dvalues.dtype.element_ty)
            tl.store(dvalues + to_last, zero, mask=use & last)
            tl.store(dscores + to_last, zero, mask=use & last)
    offset = tl.arange(0, BLOCK_P)
    to_partial = partial + (program * RATIO + offset)[:, None] * WIDTH + channel[None, :]
    mask = (offset < RATIO)[:, None] & (channel < D)[None, :]
    tl.store(to_partial + (WIDTH - D), tl.sum(dape, 0), mask=mask)
    if OVERLAP:
        tl.store(to_partial, tl.sum(dape_previous, 0), mask=mask)


@triton.jit
def _sum_partials(
    partial, dape, program, programs, size,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    column = program * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for start in range(0, programs, BLOCK_S):
        row = start + tl.arange(0, BLOCK_S)
        at = row.to(tl.int64)[:, None] * size + column[None, :]
        mask = (row < programs)[:, None] & (column < size)[None, :]
        total += tl.load(partial + at, mask=mask, other=0.0)
    tl.store(dape + column, tl.sum(total, 0).to(dape.dtype.element_ty), mask=column < size)


@triton.jit
def _zero_gaps(
    dvalues, dscores, first_token, program, tokens, groups, token_step,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = program * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = groups // token_step
    number = token // token_step // RATIO
    near = first_token + token % token_step * slots + number
    here = tl.load(near, mask=(token < tokens) & (number < slots), other=-1)
    before = tl.load(near - 1, mask=(token < tokens) & (number > 0) & (number <= slots), other=-1)
    # Tokens of other batch elements lie between a group's tokens.
    span = RATIO * token_step
    inside = (here >= 0) & (here <= token) & (token - here < span)
    inside = inside | ((before >= 0) & (token - before < span))
    gap = (token < tokens) & ~inside
    if tl.max(gap.to(tl.int32), 0) > 0:
        block: tl.constexpr = 128
        zero = tl.zeros([BLOCK_R, block], dvalues.dtype.element_ty)
        for start in range(0, WIDTH, block):
            column = start + tl.arange(0, block)
            at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
            mask = gap[:, None] & (column < WIDTH)[None, :]
            tl.store(dvalues + at, zero, mask=mask)
            tl.store(dscores + at, zero, mask=mask)


@triton.jit(do_not_specialize=["first_token", "programs", "tokens", "groups", "token_step"])
def finish_gradients(
    partial, dape, dvalues, dscores, first_token, programs, tokens, groups, token_step,
    RATIO: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = RATIO * WIDTH
    adding: tl.constexpr = (size + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    if program < adding:
        _sum_partials(partial, dape, program, programs, size, BLOCK_S, BLOCK_C)
    else:
        _zero_gaps(
            dvalues, dscores, first_token, program - adding, tokens, groups, token_step,
            RATIO, WIDTH, BLOCK_R,
        )  # fmt: skip
