"""Memory-bound kernels of hyper-connections.

A thread holds the same channels of all ``N`` streams, so it sums over streams by itself.
"""

import triton
import triton.language as tl

from megatron_dsa.ops.hyper_connections.triton.weights import split_halves


@triton.jit
def _round(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def mix(
    x, pre, weight, out, rstd, eps,
    C: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, stream = tl.arange(0, BLOCK_C), tl.arange(0, N)
    inside = column < C
    at = token * (N * C) + stream[:, None] * C + column[None, :]
    tile = tl.load(x + at, mask=inside[None, :], other=0.0).to(tl.float32)
    factors = tl.load(pre + token * N + stream)
    u = _round(tl.sum(tile * factors[:, None], 0), x.dtype.element_ty)
    scale = tl.rsqrt(tl.sum(u * u, 0) / C + eps)
    tl.store(rstd + token, scale)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * C + column, (u * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def mix_backward(
    x, pre, weight, rstd, dout, du, dpre, partial, tokens,
    C: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``u`` and ``pre``, and partial gradients of the norm's weight."""
    program = tl.program_id(0)
    column, stream = tl.arange(0, BLOCK_C), tl.arange(0, N)
    inside = column < C
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK_C], tl.float32)
    for token in tl.range(program, tokens, tl.num_programs(0), num_stages=STAGES):
        index = tl.cast(token, tl.int64)
        at = index * (N * C) + stream[:, None] * C + column[None, :]
        tile = tl.load(x + at, mask=inside[None, :], other=0.0)
        gradient = tl.load(dout + index * C + column, mask=inside, other=0.0).to(tl.float32)
        factors = tl.load(pre + index * N + stream)
        scale = tl.load(rstd + index)
        wide = tile.to(tl.float32)
        u = _round(tl.sum(wide * factors[:, None], 0), x.dtype.element_ty)
        dgain += gradient * u * scale
        gradient = gradient * gain
        from_norm, from_mean = tl.sum(wide * gradient[None, :], 1), tl.sum(wide * u[None, :], 1)
        slope = tl.sum(gradient * u, 0) * (scale * scale * scale) / C
        tl.store(dpre + index * N + stream, from_norm * scale - from_mean * slope)
        gradient = gradient * scale - u * slope
        tl.store(du + index * C + column, gradient.to(du.dtype.element_ty), mask=inside)
    tl.store(partial + program.to(tl.int64) * C + column, dgain, mask=inside)


@triton.jit(do_not_specialize=["tokens", "steps"])
def read_backward(
    x, du, pre, fn, projected, shrink, dstreams, dx, partial, tokens, steps,
    C: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the streams, and partial gradients of ``fn``, in one pass.

    A program sums ``steps`` blocks of tokens for ``BLOCK_C`` channels of a stream.
    """
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    stream = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(1)
    inside = (channel < C)[None, :]
    column = stream * C + channel
    output = tl.arange(0, BLOCK_O)
    some = (output < OUT)[None, :]
    rows = tl.load(
        fn + output[:, None] * (N * C) + column[None, :],
        mask=(output < OUT)[:, None] & inside, other=0.0,
    )  # fmt: skip
    dfn = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    nothing = tl.zeros([BLOCK_O, BLOCK_T], x.dtype.element_ty)
    # A step starts with the large loads; otherwise Triton prefetches less.
    first = (part * steps).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    for step in range(steps):
        token = first + step * BLOCK_T
        held = token < tokens
        mask = held[:, None] & inside
        at = token[:, None] * (N * C) + column[None, :]
        tile = tl.load(x + at, mask=mask, other=0.0)
        mixed = tl.load(du + token[:, None] * C + channel[None, :], mask=mask, other=0.0)
        given = mixed
        if dstreams is not None:
            given = tl.load(dstreams + at, mask=mask, other=0.0)
        factor = tl.load(pre + token * N + stream, mask=held, other=0.0)
        less = tl.load(shrink + token, mask=held, other=0.0)
        weights = tl.load(
            projected + token[:, None] * OUT + output[None, :], mask=held[:, None] & some, other=0.0
        )
        gradient = factor[:, None] * mixed.to(tl.float32) - less[:, None] * tile.to(tl.float32)
        if dstreams is not None:
            gradient += given.to(tl.float32)
        if SPLIT:
            gradient = tl.dot(weights, rows, gradient, input_precision="tf32")
            high, low = split_halves(weights, tile.dtype)
            dfn = tl.dot(tl.trans(high), tile, dfn)
            dfn = tl.dot(tl.trans(low), tile, dfn)
            # Triton prefetches loads only if a product uses them: this product with zeros does.
            dfn = tl.dot(nothing, mixed, dfn)
            if dstreams is not None:
                dfn = tl.dot(nothing, given, dfn)
        else:
            gradient = tl.dot(weights, rows, gradient, input_precision="ieee")
            dfn = tl.dot(tl.trans(weights), tile.to(tl.float32), dfn, input_precision="ieee")
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)
    to_partial = part.to(tl.int64) * (OUT * N * C) + output[:, None] * (N * C) + column[None, :]
    tl.store(partial + to_partial, dfn, mask=(output < OUT)[:, None] & inside)


@triton.jit
def write(
    output, x, post, comb, out,
    C: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    stream = tl.arange(0, N)
    inside = column < C
    at = token * (N * C) + stream[:, None] * C + column[None, :]
    tile = tl.load(x + at, mask=inside[None, :], other=0.0).to(tl.float32)
    value = tl.load(output + token * C + column, mask=inside, other=0.0).to(tl.float32)
    # Looping over streams keeps values in the thread that loaded them.
    for j in tl.static_range(N):
        parts = tl.load(comb + token * (N * N) + stream * N + j)
        new = tl.sum(tile * parts[:, None], 0) + value * tl.load(post + token * N + j)
        at = out + token * (N * C) + j * C + column
        tl.store(at, new.to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_backward(
    output, x, post, comb, dout, doutput, dx, dpost, dcomb,
    C: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    add = tl.load(post + token * N + stream)[None, :, None]
    to_matrix = token * (N * N) + stream[:, None] * N + stream[None, :]
    matrix = tl.load(comb + to_matrix)[:, :, None]
    products = tl.zeros([N, N, BLOCK_C // VEC], tl.float32)
    added = tl.zeros([1, N, BLOCK_C // VEC], tl.float32)
    for first in range(0, C, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)[None, None, :]
        inside = column < C
        at = token * (N * C) + stream[:, None, None] * C + column
        tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        to_new = token * (N * C) + stream[None, :, None] * C + column
        gradient = tl.load(dout + to_new, mask=inside, other=0.0).to(tl.float32)
        index = token * C + column
        value = tl.load(output + index, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.sum(add * gradient, 1, keep_dims=True)
        tl.store(doutput + index, dvalue.to(doutput.dtype.element_ty), mask=inside)
        back = tl.sum(matrix * gradient, 1, keep_dims=True)
        tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)
        added += tl.sum(tl.reshape(gradient * value, [1, N, BLOCK_C // VEC, VEC]), 3)
        products += tl.sum(tl.reshape(tile * gradient, [N, N, BLOCK_C // VEC, VEC]), 3)
    tl.store(dpost + token * N + stream[None, :], tl.sum(added, 2))
    tl.store(dcomb + to_matrix, tl.sum(products, 2))
