"""Triton kernel that reorders a gradient's columns."""

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _reorder(
    x, out, count, DIM: tl.constexpr, V_DIM: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (index % DIM).to(tl.int32)
    if TRANSPOSED:
        line, half, warp = column % 8, column // 8 % 2, column // 16 % 4
        first = column // 128 * 128
        source = first + warp * 32 + line * 4 + (column - first) // 64 * 2 + half
        if DIM > V_DIM:
            tail = column - V_DIM
            in_tail = V_DIM + tail // 64 * 64 + tail % 64 // 16 * 16 + line * 2 + half
            source = tl.where(tail < 0, source, in_tail)
    else:
        within = column % 16
        source = column - within + within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    inside = index < count
    tl.store(out + index, tl.load(x + (index - column + source), mask=inside), mask=inside)


def reorder(accumulator: torch.Tensor, v_dim: int, transposed: bool) -> torch.Tensor:
    out, count = torch.empty_like(accumulator), accumulator.numel()
    if count > 0:
        launch(
            _reorder, (ceil_div(count, _BLOCK),), accumulator, out, count,
            DIM=accumulator.shape[1], V_DIM=v_dim, TRANSPOSED=transposed, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out
