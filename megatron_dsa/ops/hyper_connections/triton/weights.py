"""Kernels that compute the weights of hyper-connections and sum partial gradients.

Weight kernels other than ``project`` hold a token's ``[N, N]`` matrix in the registers of one or
few threads.
"""

import triton
import triton.language as tl


@triton.jit
def split_halves(x, dtype: tl.constexpr):
    """Split fp32 ``x`` into ``high + low`` in a 16-bit dtype, accurate to 16 bits."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["tokens", "steps"])
def project(
    x, fn, sums, squares, tokens, steps,
    WIDTH: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Write partial products of ``x [tokens, WIDTH]`` and ``fn [OUT, WIDTH]``, and sums of squares.

    For bf16, ``SPLIT`` replaces ``fn`` by the sum of two bf16 numbers.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    output = tl.arange(0, BLOCK_O)
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    for step in range(steps):
        column = (part * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = column < WIDTH
        tile = tl.load(
            x + token[:, None] * WIDTH + column[None, :],
            mask=(token < tokens)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        rows = tl.load(
            fn + output[:, None] * WIDTH + column[None, :],
            mask=(output < OUT)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        rows = tl.trans(rows)
        wide = tile.to(tl.float32)
        if SPLIT:
            high, low = split_halves(rows, tile.dtype)
            total = tl.dot(tile, high, total)
            total = tl.dot(tile, low, total)
        else:
            total = tl.dot(wide, rows, total, input_precision="ieee")
        square += tl.sum(wide * wide, 1)
    row = part.to(tl.int64) * tokens + token
    tl.store(squares + row, square, mask=token < tokens)
    mask = (token < tokens)[:, None] & (output < OUT)[None, :]
    tl.store(sums + row[:, None] * OUT + output[None, :], total, mask=mask)


@triton.jit
def _rows(first, N: tl.constexpr):
    i = tl.arange(0, N)
    return first + i[None, :, None] * N + i[None, None, :]


@triton.jit
def _softmax(logits):
    e = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    return e / tl.sum(e, 2)[:, :, None]


@triton.jit(do_not_specialize=["tokens", "parts"])
def weigh(
    sums, squares, base, scale, m, rstd, pre, post, comb, tokens, parts, eps, norm_eps,
    WIDTH: tl.constexpr, N: tl.constexpr, HEAD: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the weights of ``BLOCK_T`` tokens from ``parts`` partial products."""
    OUT: tl.constexpr = N if HEAD else N * (N + 2)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    stream = tl.arange(0, N)[None, :]
    square = tl.zeros([BLOCK_T], tl.float32)
    m_pre = tl.zeros([BLOCK_T, N], tl.float32)
    m_post = tl.zeros([BLOCK_T, N], tl.float32)
    m_comb = tl.zeros([BLOCK_T, N, N], tl.float32)
    for part in range(parts):
        row = part * tokens.to(tl.int64) + token
        square += tl.load(squares + row, mask=inside, other=0.0)
        at = sums + row[:, None] * OUT + stream
        m_pre += tl.load(at, mask=inside[:, None], other=0.0)
        if not HEAD:
            m_post += tl.load(at + N, mask=inside[:, None], other=0.0)
            at = sums + row[:, None, None] * OUT + _rows(2 * N, N)
            m_comb += tl.load(at, mask=inside[:, None, None], other=0.0)
    factor = tl.rsqrt(square / WIDTH + norm_eps)
    tl.store(rstd + token, factor, mask=inside)
    m_pre = m_pre * factor[:, None]
    at = token[:, None] * OUT + stream
    tl.store(m + at, m_pre, mask=inside[:, None])
    weight = tl.sigmoid(m_pre * tl.load(scale) + tl.load(base + stream)) + eps
    tl.store(pre + token[:, None] * N + stream, weight, mask=inside[:, None])
    if not HEAD:
        m_post = m_post * factor[:, None]
        tl.store(m + at + N, m_post, mask=inside[:, None])
        weight = 2.0 * tl.sigmoid(m_post * tl.load(scale + 1) + tl.load(base + N + stream))
        tl.store(post + token[:, None] * N + stream, weight, mask=inside[:, None])
        m_comb = m_comb * factor[:, None, None]
        at = token[:, None, None] * OUT + _rows(2 * N, N)
        tl.store(m + at, m_comb, mask=inside[:, None, None])
        matrix = _softmax(m_comb * tl.load(scale + 2) + tl.load(base + _rows(2 * N, N))) + eps
        matrix = matrix / (tl.sum(matrix, 1) + eps)[:, None, :]
        for _ in range(ITERATIONS - 1):
            matrix = matrix / (tl.sum(matrix, 2) + eps)[:, :, None]
            matrix = matrix / (tl.sum(matrix, 1) + eps)[:, None, :]
        at = token[:, None, None] * (N * N) + _rows(0, N)
        tl.store(comb + at, matrix, mask=inside[:, None, None])


@triton.jit
def _sinkhorn_gradient(
    p, gradient, divisors, eps, N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Return the gradient of the softmax ``p [BLOCK_T, N, N]`` from the gradient of ``comb``.

    The iterations run again, store their divisors, and are then reversed.
    """
    at = divisors + tl.arange(0, BLOCK_T)[:, None] * N + tl.arange(0, N)[None, :]
    SIZE: tl.constexpr = BLOCK_T * N
    matrix = p + eps
    total = tl.sum(matrix, 1) + eps
    matrix = matrix / total[:, None, :]
    tl.store(at, total)
    for k in range(ITERATIONS - 1):
        total = tl.sum(matrix, 2) + eps
        matrix = matrix / total[:, :, None]
        tl.store(at + (2 * k + 1) * SIZE, total)
        total = tl.sum(matrix, 1) + eps
        matrix = matrix / total[:, None, :]
        tl.store(at + (2 * k + 2) * SIZE, total)
    tl.debug_barrier()  # threads read divisors that other threads wrote
    for back in range(ITERATIONS - 1):
        k = ITERATIONS - 2 - back
        total = tl.load(at + (2 * k + 2) * SIZE)
        gradient = gradient - tl.sum(gradient * matrix, 1)[:, None, :]
        gradient = gradient / total[:, None, :]
        matrix = matrix * total[:, None, :]
        total = tl.load(at + (2 * k + 1) * SIZE)
        gradient = gradient - tl.sum(gradient * matrix, 2)[:, :, None]
        gradient = gradient / total[:, :, None]
        matrix = matrix * total[:, :, None]
    gradient = gradient - tl.sum(gradient * matrix, 1)[:, None, :]
    return gradient / tl.load(at)[:, None, :]


@triton.jit(do_not_specialize=["tokens"])
def weigh_backward(
    m, rstd, base, scale, dpre, dpost, dcomb, projected, shrink, partial, divisors, tokens, eps,
    WIDTH: tl.constexpr, N: tl.constexpr, HEAD: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the projection, and partial gradients of ``base`` and ``scale``.

    ``partial [programs, OUT + 3]`` holds ``base``, then ``scale``.
    """
    OUT: tl.constexpr = N if HEAD else N * (N + 2)
    program = tl.program_id(0)
    token = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    stream = tl.arange(0, N)[None, :]
    mask = inside[:, None]
    partial += program * (OUT + 3)
    factor = tl.load(rstd + token, mask=inside, other=0.0)
    at = token[:, None] * OUT + stream

    value, scaling = tl.load(m + at, mask=mask, other=0.0), tl.load(scale)
    weight = tl.sigmoid(value * scaling + tl.load(base + stream))
    gradient = tl.load(dpre + token[:, None] * N + stream, mask=mask, other=0.0)
    gradient = gradient * weight * (1.0 - weight)
    tl.store(partial + tl.arange(0, N), tl.sum(gradient, 0))
    tl.store(partial + OUT, tl.sum(tl.sum(gradient * value, 1), 0))
    inner = tl.sum(gradient * value, 1) * scaling
    tl.store(projected + at, gradient * scaling * factor[:, None], mask=mask)

    if not HEAD:
        value, scaling = tl.load(m + at + N, mask=mask, other=0.0), tl.load(scale + 1)
        weight = tl.sigmoid(value * scaling + tl.load(base + N + stream))
        gradient = tl.load(dpost + token[:, None] * N + stream, mask=mask, other=0.0)
        gradient = gradient * (2.0 * weight * (1.0 - weight))
        tl.store(partial + N + tl.arange(0, N), tl.sum(gradient, 0))
        tl.store(partial + (OUT + 1), tl.sum(tl.sum(gradient * value, 1), 0))
        inner += tl.sum(gradient * value, 1) * scaling
        tl.store(projected + at + N, gradient * scaling * factor[:, None], mask=mask)

        mask = inside[:, None, None]
        at = token[:, None, None] * OUT + _rows(2 * N, N)
        value, scaling = tl.load(m + at, mask=mask, other=0.0), tl.load(scale + 2)
        p = _softmax(value * scaling + tl.load(base + _rows(2 * N, N)))
        given = token[:, None, None] * (N * N) + _rows(0, N)
        gradient = tl.load(dcomb + given, mask=mask, other=0.0)
        divisors += program.to(tl.int64) * ((2 * ITERATIONS - 1) * BLOCK_T * N)
        gradient = _sinkhorn_gradient(p, gradient, divisors, eps, N, ITERATIONS, BLOCK_T)
        gradient = p * (gradient - tl.sum(gradient * p, 2)[:, :, None])
        i = tl.arange(0, N)
        to_base = partial + 2 * N + i[:, None] * N + i[None, :]
        tl.store(to_base, tl.sum(gradient, 0))
        product = tl.sum(tl.sum(gradient * value, 2), 1)
        tl.store(partial + (OUT + 2), tl.sum(product, 0))
        inner += product * scaling
        tl.store(projected + at, gradient * scaling * factor[:, None, None], mask=mask)
    tl.store(shrink + token, factor * factor * inner / WIDTH, mask=inside)


@triton.jit
def _add(partial, total, parts, width, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + row
        at = part.to(tl.int64)[:, None] * width + column[None, :]
        sums += tl.load(partial + at, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["fn_parts", "weight_parts", "rest_parts", "fn_programs"])
def add_parts(
    fn, dfn, weight, dweight, rest, drest, fn_parts, weight_parts, rest_parts, fn_programs,
    FN: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    FN_COLUMNS: tl.constexpr, C_COLUMNS: tl.constexpr, REST_COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < fn_programs:
        _add(fn, dfn, fn_parts, FN, program, 1, FN_COLUMNS)
    elif program < tl.num_programs(0) - 1:
        _add(weight, dweight, weight_parts, C, program - fn_programs, 64, C_COLUMNS)
    else:
        _add(rest, drest, rest_parts, REST, 0, 128, REST_COLUMNS)
