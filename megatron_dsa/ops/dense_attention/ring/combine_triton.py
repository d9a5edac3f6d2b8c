"""Triton kernel that merges a partial attention output in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2
from megatron_dsa.ops.common.launch import launch


@triton.jit(do_not_specialize=["first", "count"])
def _merge(
    sums, lse, part, part_lse, result, first, count,
    sums_token, sums_head, part_token, part_head, part_lse_token, part_lse_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < H)[:, None] & (dim < D)[None, :]
    at = token * sums_token + head[:, None] * sums_head + dim[None, :]
    value = tl.load(sums + at, mask=inside, other=0.0).to(tl.float32)
    # Tokens outside the part are only copied.
    token_in_part = token - first
    heads = (head < H) & (token_in_part >= 0) & (token_in_part < count)
    old = tl.load(lse + token * H + head, mask=head < H, other=float("-inf"))
    new = tl.load(
        part_lse + token_in_part * part_lse_token + head * part_lse_head,
        mask=heads, other=float("-inf"),
    )  # fmt: skip
    seen = new > float("-inf")
    share = tl.where(seen, 1.0 / (1.0 + tl.exp(old - new)), 0.0)
    at = token_in_part * part_token + head[:, None] * part_head + dim[None, :]
    other = tl.load(part + at, mask=inside & seen[:, None], other=0.0).to(tl.float32)
    value += share[:, None] * (other - value)
    at = token * H * D + head[:, None] * D + dim[None, :]
    tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)
    larger = tl.maximum(old, new)
    total = larger + tl.log(tl.exp(old - larger) + tl.exp(new - larger))
    tl.store(lse + token * H + head, tl.where(seen, total, old), mask=heads)


def merge(sums, lse, part, part_lse, first: int, dtype: torch.dtype) -> torch.Tensor:
    count = part.shape[0]
    in_place = sums.dtype == dtype and sums.is_contiguous()
    result = sums if in_place else torch.empty(sums.shape, dtype=dtype, device=sums.device)
    written = result
    if in_place:
        mine = slice(first, first + count)
        sums, lse, written, first = sums[mine], lse[mine], result[mine], 0
    tokens, heads, dim = sums.shape
    block_d = next_power_of_2(dim)
    block_h = min(next_power_of_2(heads), max(1, 4096 // block_d))
    launch(
        _merge, (tokens * ceil_div(heads, block_h),),
        sums, lse, part, part_lse, written, first, count,
        sums.stride(0), sums.stride(1), part.stride(0), part.stride(1), *part_lse.stride(),
        H=heads, D=dim, BLOCK_H=block_h, BLOCK_D=block_d,
    )  # fmt: skip
    return result
