"""Triton kernel that sums probabilities over heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.torch import denominator

#: Product sizes of a thread block: key entries, dims per step, fewest and most heads.
ENTRIES, DIMS, LEAST_HEADS, MOST_HEADS = 64, 64, 16, 128
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["keys", "width"])
def head_sums(
    q, kv, indices, topk_length, total, p_sum, keys, width, q_token, q_head, kv_token, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    held = slot < width
    if topk_length is not None:
        held = held & (slot < tl.load(topk_length + query))
    key = tl.load(indices + query * width + slot, mask=held, other=-1)
    selects = (key >= 0) & (key < keys)
    key_at = tl.where(selects, key, 0).to(tl.int64) * kv_token
    sums = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.static_range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        real = head < HEADS
        scores = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
        for column in range(0, DIM, BLOCK_D):
            dim = column + tl.arange(0, BLOCK_D)
            inside = (dim < DIM)[None, :]
            queries = tl.load(
                q + query * q_token + head[:, None] * q_head + dim[None, :],
                mask=real[:, None] & inside, other=0.0,
            )  # fmt: skip
            # Invalid entries point to key 0, which may be NaN.
            at = key_at[:, None] + dim[None, :]
            chosen = tl.load(kv + at, mask=selects[:, None] & inside, other=0.0)
            scores = tl.dot(queries, tl.trans(chosen), scores, input_precision="ieee")
        divisor = tl.load(total + query * HEADS + head, mask=real, other=float("inf"))
        sums += tl.sum(tl.exp2((scores * scale - divisor[:, None]) * _LOG2_E), 0)
    tl.store(p_sum + query * width + slot, tl.where(selects, sums, 0.0), mask=slot < width)


def probabilities(inputs: SparseAttentionInputs, lse: torch.Tensor) -> torch.Tensor:
    q, kv = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs.q, inputs.kv))
    indices, (queries, width) = inputs.indices.contiguous(), inputs.indices.shape
    length = None if inputs.topk_length is None else inputs.topk_length.contiguous()
    heads, dim = q.shape[1:]
    p_sum = torch.empty(queries, width, dtype=torch.float32, device=q.device)
    if p_sum.numel() == 0:
        return p_sum
    block_h = min(MOST_HEADS, max(LEAST_HEADS, next_power_of_2(heads)))
    launch(
        head_sums, (queries, ceil_div(width, ENTRIES)),
        q, kv, indices, length, denominator(inputs, lse).contiguous(), p_sum, kv.shape[0], width,
        q.stride(0), q.stride(1), kv.stride(0), inputs.softmax_scale,
        HEADS=heads, DIM=dim, BLOCK_H=block_h, BLOCK_K=ENTRIES,
        BLOCK_D=min(DIMS, max(16, next_power_of_2(dim))),
        num_warps=8 if block_h == MOST_HEADS else 4, num_stages=3,
    )  # fmt: skip
    return p_sum
