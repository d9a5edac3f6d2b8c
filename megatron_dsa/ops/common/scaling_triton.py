"""Scaling of up to three gradients in one launch.

torch multiplies mixed dtypes element by element, at a sixth of the bandwidth.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch

BLOCK = 4096


@triton.jit
def _factor(number, times, over):
    value = tl.full((), number, tl.float64)
    if times is not None:
        value *= tl.load(times).to(tl.float64)
    if over is not None:
        value /= tl.load(over).to(tl.float64)
    return value


@triton.jit
def _scale_block(x, out, block, count, factor, BLOCK: tl.constexpr):
    index = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= count:  # masks would prevent vectorised accesses
        values = tl.load(x + index).to(tl.float32) * factor
        tl.store(out + index, values.to(out.dtype.element_ty))
    else:
        inside = index < count
        values = tl.load(x + index, mask=inside).to(tl.float32) * factor
        tl.store(out + index, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["number", "count", "count_b", "count_c"])
def _scale(
    x, out, count, x_b, out_b, count_b, x_c, out_c, count_c, number, times, over,
    BLOCK: tl.constexpr,
):  # fmt: skip
    factor = _factor(number, times, over).to(tl.float32)
    # Counts above 2^31 are int64, and both branches must have the same dtype.
    block = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(count, BLOCK).to(tl.int64)
    if block < blocks:
        _scale_block(x, out, block, count, factor, BLOCK)
    else:
        block -= blocks
        if x_b is not None:
            blocks = tl.cdiv(count_b, BLOCK).to(tl.int64)
            if block < blocks:
                _scale_block(x_b, out_b, block, count_b, factor, BLOCK)
            else:
                block -= blocks
                if x_c is not None:
                    _scale_block(x_c, out_c, block, count_c, factor, BLOCK)


def scale(
    gradients: Sequence[torch.Tensor],
    number: float,
    times: torch.Tensor | None,
    over: torch.Tensor | None,
    results: Sequence[torch.Tensor],
) -> None:
    some = [(x, out) for x, out in zip(gradients, results, strict=True) if x.numel()]
    if not some:
        return
    programs = sum(ceil_div(x.numel(), BLOCK) for x, _ in some)
    tensors = [y for x, out in some for y in (x, out, x.numel())]
    tensors += [None, None, 0] * (3 - len(some))
    launch(_scale, (programs,), *tensors, number, times, over, BLOCK=BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["number"])
def _add_scaled(sums, counts, value, number, times, over):
    term = tl.load(value).to(tl.float64) * _factor(number, times, over)
    tl.store(sums, tl.load(sums) + term.to(tl.float32))
    tl.store(counts, tl.load(counts) + 1)


def add_scaled(sums, counts, value, number: float, times, over) -> None:
    launch(_add_scaled, (1,), sums, counts, value, number, times, over, num_warps=1)
