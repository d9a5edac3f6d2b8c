"""Triton kernels that compute the dense loss's gradients from score gradients (``dS``, bf16).

No two programs add to the same sum: results are bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_dsa.ops.indexer_loss.triton.teacher import seen_range, tile_queries

#: Varying sizes must not trigger recompilation.
_PER_TILE = ["start", "end", "queries", "width"]


@triton.jit(do_not_specialize=_PER_TILE)
def query_gradient(
    q, keys, dscores, dq, start, end, queries, width, stride, q_stride,
    RELU: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dq[t, h] += sum_s dS[t, s] 1[q[t, h] . k[s] > 0] k[s]``.

    Even hidden ``keys`` must be finite; ``dscores`` is in whole blocks.
    """
    head = tl.program_id(0) % HEADS
    first_query = tl.program_id(0) // HEADS * BLOCK_M
    query, safe_query, begin, stop = tile_queries(start, end, first_query, queries, BLOCK_M)
    low, high = seen_range(begin, stop, width)
    dim = tl.arange(0, DIM)
    offset = tl.arange(0, BLOCK_N)
    q_tile = tl.load(q + safe_query.to(tl.int64)[:, None] * q_stride + head * DIM + dim[None, :])
    ds_at = dscores + query.to(tl.int64)[:, None] * stride
    total = tl.zeros([BLOCK_M, DIM], tl.float32)
    for block in tl.range(low // BLOCK_N, tl.cdiv(high, BLOCK_N), num_stages=STAGES):
        column = block * BLOCK_N + offset
        safe_column = tl.minimum(column, width - 1)
        k_tile = tl.load(keys + safe_column[:, None] * DIM + dim[None, :])
        gradient = tl.load(ds_at + column[None, :])
        if RELU:
            products = tl.dot(q_tile, tl.trans(k_tile))
            gradient = tl.where(products > 0.0, gradient, 0.0)
        total = tl.dot(gradient, k_tile, total)
    if low < high:
        at = dq + (query.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        inside = (query < queries)[:, None]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)


@triton.jit(do_not_specialize=_PER_TILE)
def key_gradient(
    q, keys, weights, dscores, dk, start, end, queries, width, stride, q_stride, weight_stride,
    RELU: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dk[s] = sum_{t, h} w[t, h] dS[t, s] 1[q[t, h] . k[s] > 0] q[t, h]`` per block of queries.

    ``weights``: fp32 ``[HEADS, weight_stride]`` in whole blocks, 0 for queries without visible
    keys; ``dk``: fp32 ``[blocks, width, DIM]``.
    """
    blocks = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // blocks
    first_column = tl.program_id(0) % blocks * BLOCK_N
    query, safe_query, begin, stop = tile_queries(start, end, block * BLOCK_M, queries, BLOCK_M)
    low, high = seen_range(begin, stop, width)
    dim = tl.arange(0, DIM)
    column = first_column + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, DIM], tl.float32)
    if (low < first_column + BLOCK_N) & (high > first_column):
        # Queries without visible keys may be NaN.
        real = begin < stop
        k_tile = tl.load(keys + tl.minimum(column, width - 1)[:, None] * DIM + dim[None, :])
        ds_at = dscores + query.to(tl.int64)[:, None] * stride + column[None, :]
        ds_tile = tl.trans(tl.load(ds_at))
        q_at = q + safe_query.to(tl.int64)[:, None] * q_stride + dim[None, :]
        for head in tl.range(0, HEADS, num_stages=STAGES):
            weight = tl.load(weights + head * weight_stride + query)
            q_tile = tl.load(q_at + head * DIM, mask=real[:, None], other=0.0)
            gradient = ds_tile.to(tl.float32) * weight[None, :]
            if RELU:
                products = tl.dot(k_tile, tl.trans(q_tile))
                gradient = tl.where(products > 0.0, gradient, 0.0)
            total = tl.dot(gradient.to(q_tile.dtype), q_tile, total)
    at = dk + (block.to(tl.int64) * width + column)[:, None] * DIM + dim[None, :]
    tl.store(at, total, mask=(column < width)[:, None])


@triton.jit(do_not_specialize=["weights", "dweights", "start", "end", "queries"])
def finish_queries(
    q, weights, dq, out, dweights, start, end, queries,
    q_stride, weight_stride, out_stride, dweights_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``out = w dq`` and ``dweights = q . dq`` of a query, 0 without visible keys."""
    query = tl.program_id(0).to(tl.int64)
    real = tl.load(start + query) < tl.load(end + query)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, DIM)
    inside = head < HEADS
    offset = head[:, None] * DIM + dim[None, :]
    wanted = inside & real
    gradient = tl.load(dq + query * HEADS * DIM + offset, mask=wanted[:, None], other=0.0)
    q_tile = tl.load(q + query * q_stride + offset, mask=wanted[:, None], other=0.0)
    weight = tl.load(weights + query * weight_stride + head, mask=wanted, other=0.0)
    total = tl.sum(gradient * q_tile.to(tl.float32), 1)
    gradient = gradient * weight.to(tl.float32)[:, None]
    tl.store(out + query * out_stride + offset, gradient.to(out.dtype.element_ty), inside[:, None])
    tl.store(dweights + query * dweights_stride + head, total, inside)
