"""Triton kernels that prepare inputs and results of the TileLang kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.masked_attention.spec import GROUP, groups

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 64
_GROUPS = 8


def numbers(lse: torch.Tensor, out: torch.Tensor | None, dout: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 ``[H, 2, N]``: lse in base 2, and delta, ``(out * dout).sum(-1)``.

    ``N`` is ``Sq`` rounded up to whole groups. The lse is ``inf`` without keys and past the end;
    delta is undefined without ``out``.
    """
    queries, heads = lse.shape
    count = groups(queries) * GROUP
    result = lse.new_empty(heads, 2, count)
    if result.numel() > 0:
        dims = 0 if out is None else out.shape[2]
        launch(
            _numbers, (count // _BLOCK, heads),
            lse, out, dout, result, queries, heads, count, DIMS=dims, BLOCK=_BLOCK,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["queries", "heads", "count"])
def _numbers(
    lse, out, dout, result, queries, heads, count, DIMS: tl.constexpr, BLOCK: tl.constexpr
):
    query = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    inside = query < queries
    index = query * heads + head
    value = tl.load(lse + index, mask=inside, other=float("-inf"))
    value = tl.where(value == float("-inf"), float("inf"), value * _LOG2_E)
    target = result + head * 2 * count + query
    tl.store(target, value)
    if DIMS > 0:
        at = index[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
        a = tl.load(out + at, mask=inside[:, None], other=0).to(tl.float32)
        b = tl.load(dout + at, mask=inside[:, None], other=0).to(tl.float32)
        tl.store(target + count, tl.sum(a * b, 1))


def keys_before(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count selected keys before each group, int32 ``[Sq, G]``, and in total, int32 ``[Sq]``."""
    queries, key_groups = bits.shape[:2]
    before, total = bits.new_empty(queries, key_groups), bits.new_empty(queries)
    if queries > 0:
        launch(_keys_before, (queries,), bits.contiguous(), before, total, key_groups, BLOCK=128)
    return before, total


@triton.jit(do_not_specialize=["key_groups"])
def _keys_before(bits, before, total, key_groups, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * key_groups
    found = 0
    for first in range(0, key_groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        inside = group < key_groups
        at = (begin + group)[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(bits + at, mask=inside[:, None], other=0).to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        count = tl.sum(((x * 0x01010101) >> 24).to(tl.int32), 1)
        up_to = tl.cumsum(count, 0)
        tl.store(before + begin + group, found + up_to - count, mask=inside)
        found += tl.sum(count, 0)
    tl.store(total + tl.program_id(0), found)


def listed_keys(
    bits: torch.Tensor, before: torch.Tensor, length: torch.Tensor, width: int
) -> torch.Tensor:
    """Return int32 ``[Sq, width]``: the first ``width`` selected keys, ascending, then -1."""
    queries, key_groups = bits.shape[:2]
    if key_groups == 0:
        return bits.new_full((queries, width), -1)
    indices = bits.new_empty(queries, width)
    if queries > 0 and width > 0:
        grid = (queries, ceil_div(key_groups, _GROUPS))
        launch(
            _list_keys, grid,
            bits, before, length, indices, key_groups, width, GROUPS=_GROUPS, BLOCK=256,
        )  # fmt: skip
    return indices


@triton.jit(do_not_specialize=["key_groups", "width"])
def _list_keys(
    bits, before, length, indices, key_groups, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    total = tl.load(length + query)
    share = tl.cdiv(width, tl.num_programs(1))
    begin = tl.program_id(1) * share
    for start in range(0, share, BLOCK):
        entry = begin + start + tl.arange(0, BLOCK)
        rest = (entry >= total) & (entry < tl.minimum(begin + share, width))
        tl.store(indices + query * width + entry, -1, mask=rest)
    at = before + query * key_groups + first
    found = tl.load(at)
    end = total
    if first + GROUPS < key_groups:
        end = tl.load(at + GROUPS)
    if found < end:
        key = tl.arange(0, GROUPS * 128)
        word = (query * key_groups + first) * 4 + key // 128 * 4 + key % 8 // 2
        x = tl.load(bits + word, mask=first + key // 128 < key_groups, other=0)
        flag = (x >> (key % 128 // 8 * 2 + key % 2)) & 1
        slot = found + tl.cumsum(flag, 0) - 1
        target = indices + query * width + slot
        tl.store(target, first * 128 + key, mask=(flag != 0) & (slot < width))


def round_gradient(dq: torch.Tensor, sums: torch.Tensor, first: int, scale: float) -> None:
    """Write ``sums * scale`` to the heads of ``dq`` from ``first`` on, in column order.

    ``sums`` is fp32 ``[Sq, part, D]`` in fragment order (``in_column_order``).
    """
    queries, part, dims = sums.shape
    if sums.numel() > 0:
        grid = (queries, ceil_div(part * dims, 1024))
        launch(_round, grid, dq, sums, first * dims, dq.stride(0), part * dims, scale, BLOCK=1024)


@triton.jit(do_not_specialize=["first", "stride", "columns"])
def _round(dq, sums, first, stride, columns, scale, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # 16 columns are [half, thread, 2] in dq but [thread, half, 2] in the sums.
    index = column % 16
    source = column - index + index % 8 // 2 * 4 + index // 8 * 2 + index % 2
    x = tl.load(sums + query * columns + source, mask=inside, other=0.0)
    tl.store(dq + query * stride + first + column, (x * scale).to(dq.dtype.element_ty), mask=inside)
