"""Triton kernels that quantize, check and write selections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.layout.layout import Seen

ELEMENTS = 8192
_LARGEST = tl.constexpr(448.0)
_MANTISSA = tl.constexpr(0x7FFFFF)
_PROGRAMS, _BLOCK = 512, 4096
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["count"])
def _quantize(x, out, scales, count, DIM: tl.constexpr, VECTORS: tl.constexpr, LEAST: tl.constexpr):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    inside = vector < count
    at = vector[:, None] * DIM + tl.arange(0, DIM)[None, :]
    values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    if LEAST > 0:
        bits = (tl.maximum(largest, LEAST) * (1 / _LARGEST)).to(tl.int32, bitcast=True)
        scale = ((bits + _MANTISSA) & ~_MANTISSA).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(largest, _LARGEST)
        scale = tl.where(scale > 0, scale, 1.0)
    values = tl.div_rn(values, scale[:, None])
    # Conversion to e4m3 saturates above 448 and keeps NaN.
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(scales + vector, scale, mask=inside)


def quantize(x: torch.Tensor, least: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    dim = x.shape[-1]
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    vectors = max(ELEMENTS // dim, 1)
    if x.numel():
        launch(
            _quantize, (ceil_div(scales.numel(), vectors),),
            x, out, scales, scales.numel(), DIM=dim, VECTORS=vectors, LEAST=least,
            num_warps=8,
        )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["first", "topk", "stride", "key_indices"])
def _put(out, columns, start, end, key_indices, first, topk, stride, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < topk
    begin, stop = tl.load(start + query), tl.load(end + query)
    column = tl.where(begin + entry < stop, begin + entry, -1)
    if columns is not None:
        given = tl.load(columns + query * topk + entry, mask=inside, other=-1)
        column = tl.where(stop - begin > topk, given, column)
    key = column + first
    if key_indices is not None:
        key = tl.load(key_indices + key, mask=inside & (column >= 0), other=0).to(tl.int32)
    tl.store(out + query * stride + entry, tl.where(column < 0, -1, key), mask=inside)


def put(
    out: torch.Tensor,
    columns: torch.Tensor | None,
    seen: Seen,
    first: int,
    key_indices: torch.Tensor | None,
) -> None:
    (tokens, topk), block = out.shape, 1024
    if out.numel():
        columns = None if columns is None else columns.contiguous()
        launch(
            _put, (tokens, ceil_div(topk, block)), out,
            columns, seen.start, seen.end, key_indices, first, topk, out.stride(0), BLOCK=block,
        )  # fmt: skip


@triton.jit
def _largest(x, unseen, width, count, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for begin in range(first, count, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < count
        if unseen is not None:
            inside &= tl.load(unseen + index // width, mask=inside, other=1) == 0
        value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & _MAGNITUDE)
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["q_width", "k_width", "w_width", "q_count", "k_count", "w_count"])
def _magnitudes(
    q, k, weights, unseen_queries, unseen_keys, out, q_width, k_width, w_width, q_count, k_count,
    w_count, BLOCK: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    at = out + tl.program_id(0)
    tl.store(at, _largest(q, unseen_queries, q_width, q_count, BLOCK))
    tl.store(at + programs, _largest(k, unseen_keys, k_width, k_count, BLOCK))
    tl.store(at + 2 * programs, _largest(weights, unseen_queries, w_width, w_count, BLOCK))


@triton.jit(do_not_specialize=["limit"])
def _fit(largest, holds, limit, PROGRAMS: tl.constexpr):
    index = tl.arange(0, PROGRAMS)
    q = tl.max(tl.load(largest + index), 0).to(tl.float32, bitcast=True)
    k = tl.max(tl.load(largest + PROGRAMS + index), 0).to(tl.float32, bitcast=True)
    weights = tl.max(tl.load(largest + 2 * PROGRAMS + index), 0).to(tl.float32, bitcast=True)
    products = q * k
    # The comparison is false for NaN.
    tl.store(holds, products + products * weights < limit)


def sums_fit(
    tensors: Sequence[torch.Tensor], unseen: Sequence[torch.Tensor | None], limit: float
) -> torch.Tensor:
    q, k, weights = (x.contiguous() for x in tensors)
    largest = q.new_empty(3, _PROGRAMS, dtype=torch.int32)
    holds = q.new_empty((), dtype=torch.bool)
    widths = (x.numel() // len(x) for x in (q, k, weights))
    launch(
        _magnitudes, (_PROGRAMS,),
        q, k, weights, unseen[0], unseen[1], largest, *widths, q.numel(), k.numel(),
        weights.numel(), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    launch(_fit, (1,), largest, holds, limit, PROGRAMS=_PROGRAMS, num_warps=4)
    return holds
