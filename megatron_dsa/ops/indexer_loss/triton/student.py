"""Triton kernels for the student of the dense indexer loss."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_dsa.ops.indexer_loss.triton.teacher import LOG2_E, seen_range, tile_queries

_LN_2 = tl.constexpr(0.6931471805599453)

#: Varying sizes must not trigger recompilation.
_PER_TILE = ["weights", "start", "end", "student_lse", "out", "queries", "width", "part_stride"]


@triton.jit
def _scores(
    q, keys, weights, safe_query, safe_column, q_stride, weight_stride,
    RELU: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``sum_h w[t, h] relu(q[t, h] . k[s])``, unmasked."""
    dim = tl.arange(0, DIM)
    k_tile = tl.trans(tl.load(keys + safe_column[:, None] * DIM + dim[None, :]))
    q_at = q + safe_query.to(tl.int64)[:, None] * q_stride + dim[None, :]
    w_at = weights + safe_query.to(tl.int64) * weight_stride
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    weight = tl.load(w_at)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        following = tl.load(w_at + tl.minimum(head + 1, HEADS - 1))
        products = tl.dot(tl.load(q_at + head * DIM), k_tile)
        if RELU:
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores += weight.to(tl.float32)[:, None] * products
        weight = following
    return scores


@triton.jit(do_not_specialize=[name for name in _PER_TILE if name != "student_lse"])
def student_lse(
    q, keys, weights, out, start, end, queries, width, part_stride, q_stride, weight_stride,
    RELU: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out[block, t]``: log-sum-exp of a query's visible scores in a block of keys."""
    blocks = tl.cdiv(width, BLOCK_N)
    first_query = tl.program_id(0) // blocks * BLOCK_M
    block = tl.program_id(0) % blocks
    first_column = block * BLOCK_N
    query, safe_query, begin, stop = tile_queries(start, end, first_query, queries, BLOCK_M)
    low, high = seen_range(begin, stop, width)
    lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if (low < first_column + BLOCK_N) & (high > first_column):
        column = first_column + tl.arange(0, BLOCK_N)
        scores = _scores(
            q, keys, weights, safe_query, tl.minimum(column, width - 1), q_stride, weight_stride,
            RELU, HEADS, DIM, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < stop[:, None])
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        peak = tl.max(scores, 1)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        lse = (shift + tl.log2(tl.sum(tl.exp2(scores - shift[:, None]), 1))) * _LN_2
    tl.store(out + block * part_stride + query, lse, mask=query < queries)


@triton.jit(do_not_specialize=_PER_TILE)
def student_loss(
    q, keys, weights, teacher, student_lse, out, dscores, start, end, queries, width, part_stride,
    stride, q_stride, weight_stride,
    RELU: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out[block, t]``: KL sum of a query in a block of keys; ``dscores = student - teacher``."""
    blocks = stride // BLOCK_N
    first_query = tl.program_id(0) // blocks * BLOCK_M
    block = tl.program_id(0) % blocks
    first_column = block * BLOCK_N
    query, safe_query, begin, stop = tile_queries(start, end, first_query, queries, BLOCK_M)
    low, high = seen_range(begin, stop, width)
    column = first_column + tl.arange(0, BLOCK_N)
    at = query.to(tl.int64)[:, None] * stride + column[None, :]
    loss = tl.zeros([BLOCK_M], tl.float32)
    if (low < first_column + BLOCK_N) & (high > first_column):
        scores = _scores(
            q, keys, weights, safe_query, tl.minimum(column, width - 1), q_stride, weight_stride,
            RELU, HEADS, DIM, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        log_student = scores - tl.load(student_lse + safe_query)[:, None]
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < stop[:, None])
        goal = tl.load(teacher + at)
        # NaN in the teacher must reach the loss.
        log_goal = tl.log2(tl.where(goal == 0.0, 1.0, goal)) * _LN_2
        loss = tl.sum(tl.where(seen, goal * (log_goal - log_student), 0.0), 1)
        if dscores is not None:
            gradient = tl.where(seen, tl.exp2(log_student * LOG2_E) - goal, 0.0)
            tl.store(dscores + at, gradient.to(dscores.dtype.element_ty))
    elif dscores is not None:
        zero = tl.zeros([BLOCK_M, BLOCK_N], dscores.dtype.element_ty)
        tl.store(dscores + at, zero)
    tl.store(out + block * part_stride + query, loss, mask=query < queries)
