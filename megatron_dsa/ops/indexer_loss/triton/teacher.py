"""Triton kernels for the teacher of the dense indexer loss.

One loop runs over both heads (or blocks of keys) and chunks of :data:`CHUNK` dims, so that loads
overlap for any head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

#: Varying sizes must not trigger recompilation.
PER_TILE = ["lse", "start", "end", "queries", "width", "heads", "lse_stride"]


@triton.jit
def tile_queries(start, end, first, queries, BLOCK: tl.constexpr):
    query = first + tl.arange(0, BLOCK)
    inside = query < queries
    begin = tl.load(start + query, mask=inside, other=0)
    stop = tl.load(end + query, mask=inside, other=0)
    return query, tl.minimum(query, queries - 1), begin, stop


@triton.jit
def seen_range(begin, stop, width):
    low = tl.min(tl.where(begin < stop, begin, width), 0)
    high = tl.max(tl.where(begin < stop, stop, 0), 0)
    return tl.minimum(low, high), high


@triton.jit
def _chunk_product(
    scores, q_start, k_start, shared_start, chunk,
    DIM: tl.constexpr, K_DIM: tl.constexpr, CHUNK_D: tl.constexpr,
):  # fmt: skip
    dim = chunk * CHUNK_D + tl.arange(0, CHUNK_D)
    if DIM == K_DIM:
        k_at = k_start[:, None] + dim[None, :]
    else:
        k_chunks: tl.constexpr = K_DIM // CHUNK_D
        k_at = tl.where(chunk < k_chunks, k_start, shared_start - K_DIM)[:, None] + dim[None, :]
    if DIM % CHUNK_D == 0:
        q_tile = tl.load(q_start[:, None] + dim[None, :])
        k_tile = tl.load(k_at)
    else:
        q_tile = tl.load(q_start[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        k_tile = tl.load(k_at, mask=(dim < DIM)[None, :], other=0.0)
    return tl.dot(q_tile, tl.trans(k_tile), scores)


@triton.jit(do_not_specialize=PER_TILE)
def head_sums(
    q, k, shared, lse, out, start, end, queries, width, heads, lse_stride, out_stride,
    q_stride, q_head_stride, k_stride, k_head_stride, shared_stride, scale,
    FIRST: tl.constexpr, DIM: tl.constexpr, K_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out[t, s] (+)= sum_h exp(scale * q[t, h] . k[s, h] - lse[h, t])``, 0 at hidden keys."""
    blocks = out_stride // BLOCK_N
    first_query = tl.program_id(0) // blocks * BLOCK_M
    first_column = tl.program_id(0) % blocks * BLOCK_N
    query, safe_query, begin, stop = tile_queries(start, end, first_query, queries, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    out_at = out + query.to(tl.int64)[:, None] * out_stride + column[None, :]
    low, high = seen_range(begin, stop, width)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if (low < first_column + BLOCK_N) & (high > first_column):
        safe_column = tl.minimum(column, width - 1).to(tl.int64)
        q_start = q + safe_query.to(tl.int64) * q_stride
        k_start = k + safe_column * k_stride
        shared_start = k_start
        if DIM != K_DIM:
            shared_start = shared + safe_column * shared_stride
        chunks: tl.constexpr = (DIM + CHUNK_D - 1) // CHUNK_D
        lse_at = lse + safe_query
        shift = tl.load(lse_at) * LOG2_E
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, heads * chunks, num_stages=STAGES):
            head, chunk = step // chunks, step % chunks
            scores = _chunk_product(
                scores, q_start + head * q_head_stride, k_start + head * k_head_stride,
                shared_start, chunk, DIM, K_DIM, CHUNK_D,
            )  # fmt: skip
            if chunk == chunks - 1:
                total += tl.exp2(scores * (scale * LOG2_E) - shift[:, None])
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                following = tl.minimum(head + 1, heads - 1)
                shift = tl.load(lse_at + following.to(tl.int64) * lse_stride) * LOG2_E
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < stop[:, None])
        total = tl.where(seen, total, 0.0)
        if not FIRST:
            total += tl.load(out_at)
        tl.store(out_at, total)
    elif FIRST:
        tl.store(out_at, total)


@triton.jit(do_not_specialize=PER_TILE)
def head_lse(
    q, k, shared, lse, start, end, queries, width, heads, lse_stride,
    q_stride, q_head_stride, k_stride, k_head_stride, shared_stride, scale,
    DIM: tl.constexpr, K_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``lse[h, t] = log sum_s exp(scale * q[t, h] . k[s, h])`` over the keys visible to ``t``."""
    blocks = tl.cdiv(queries, BLOCK_M)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_query = tl.program_id(0) % blocks * BLOCK_M
    query, safe_query, begin, stop = tile_queries(start, end, first_query, queries, BLOCK_M)
    low, high = seen_range(begin, stop, width)
    q_start = q + head * q_head_stride + safe_query.to(tl.int64) * q_stride
    chunks: tl.constexpr = (DIM + CHUNK_D - 1) // CHUNK_D
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_block = low // BLOCK_N
    steps = (tl.cdiv(high, BLOCK_N) - first_block) * chunks
    for step in tl.range(0, steps, num_stages=STAGES):
        block, chunk = first_block + step // chunks, step % chunks
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_column = tl.minimum(column, width - 1).to(tl.int64)
        k_start = k + head * k_head_stride + safe_column * k_stride
        shared_start = k_start
        if DIM != K_DIM:
            shared_start = shared + safe_column * shared_stride
        scores = _chunk_product(scores, q_start, k_start, shared_start, chunk, DIM, K_DIM, CHUNK_D)
        if chunk == chunks - 1:
            seen = (column[None, :] >= begin[:, None]) & (column[None, :] < stop[:, None])
            scores = tl.where(seen, scores * (scale * LOG2_E), float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            mass = mass * tl.exp2(peak - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
            peak = higher
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(lse + head * lse_stride + query, (shift + tl.log2(mass)) * _LN_2, mask=query < queries)
