"""Key lists of V4's attention in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.key_lists.spec import ListInputs

# Varying sizes must not trigger recompilation.
_ARGUMENTS = [
    "start", "end", "key_indices", "selected", "selected_length", "group_start", "group_end",
    "indices", "length", "tokens", "window", "offset", "topk", "stride", "width",
]  # fmt: skip


@triton.jit(do_not_specialize=_ARGUMENTS)
def _build(
    start, end, key_indices, selected, selected_length, group_start, group_end, indices, length,
    tokens, window, offset, topk, stride, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = token < tokens
    last = tl.load(end + token, mask=inside, other=0)
    in_window = tl.maximum(last - tl.load(start + token, mask=inside, other=0), 0)
    in_window = tl.minimum(tl.minimum(in_window, window), width)
    count = tl.zeros([BLOCK_R], tl.int32)
    first_group = tl.zeros([BLOCK_R], tl.int32)
    at_selected = token.to(tl.int64)[:, None] * stride
    if selected is not None:
        if selected_length is not None:
            count = tl.load(selected_length + token, mask=inside, other=0)
        else:
            for begin in range(0, topk, BLOCK_C):
                column = (begin + tl.arange(0, BLOCK_C))[None, :]
                mask = inside[:, None] & (column < topk)
                slot = tl.load(selected + at_selected + column, mask=mask, other=-1)
                count += tl.sum((slot >= 0).to(tl.int32), 1)
        count = tl.minimum(tl.maximum(count, 0), topk)
    elif group_start is not None:
        first_group = tl.load(group_start + token, mask=inside, other=0)
        count = tl.maximum(tl.load(group_end + token, mask=inside, other=0) - first_group, 0)
    count = tl.minimum(count, width - in_window)
    total = count + in_window
    tl.store(length + token, total, mask=inside)
    shift = last - total  # list entry ``count + j`` is slot ``last - in_window + j``
    for begin in range(0, width, BLOCK_C):
        column = (begin + tl.arange(0, BLOCK_C))[None, :]
        compressed = column < count[:, None]
        used = column < total[:, None]
        slot = column + shift[:, None]
        if key_indices is not None:
            slot = tl.load(key_indices + slot, mask=used & (column >= count[:, None]), other=-1)
            slot = slot.to(tl.int32)
        if selected is not None:
            group = tl.load(selected + at_selected + column, mask=compressed, other=-1)
        else:
            group = column + first_group[:, None]
        entry = tl.where(compressed, group, tl.where(used, slot + offset, -1))
        at = indices + token.to(tl.int64)[:, None] * width + column
        tl.store(at, entry, mask=inside[:, None] & (column < width))


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def build(inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = inputs.start.shape[0], inputs.width
    indices = inputs.start.new_empty(tokens, width)
    length = inputs.start.new_empty(tokens)
    selected = _dense(inputs.selected)
    topk, stride = (0, 0) if selected is None else (selected.shape[1], selected.stride(0))
    # Each program writes the lists of 16 tokens, since short lists have only 128 entries.
    if tokens > 0:
        launch(
            _build, (ceil_div(tokens, 16),),
            _dense(inputs.start), _dense(inputs.end), _dense(inputs.key_indices), selected,
            _dense(inputs.selected_length), _dense(inputs.group_start),
            _dense(inputs.group_end), indices, length, tokens, inputs.window, inputs.offset, topk,
            stride, width, BLOCK_R=16, BLOCK_C=128,
        )  # fmt: skip
    return indices, length
