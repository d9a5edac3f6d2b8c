"""Reordering of head sums from a kernel's lists to the caller's lists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div, items_within, valid_entries
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.common.scaling import has_triton


def to_callers_lists(
    out: torch.Tensor,
    sums: torch.Tensor,
    slots: torch.Tensor | None,
    indices: torch.Tensor,
    length: torch.Tensor | None,
    keys: int,
    workspace_bytes: int,
) -> None:
    """Write the head sum of each entry in the caller's lists, 0 for invalid entries.

    Args:
        out: fp32 ``[Sq, K]``, contiguous.
        sums: fp32 ``[at least Sq, W]``, contiguous, in the kernel's order.
        slots: int32 ``[Sq, K]``: index of each valid entry in ``sums``; ``None``: same order.
    """
    queries, width = indices.shape
    if out.is_meta:
        return
    if out.is_cuda and has_triton():
        if out.numel():
            block = 1024
            launch(
                _order, (queries, ceil_div(width, block)),
                out, sums, None if slots is None else slots.contiguous(), indices.contiguous(),
                None if length is None else length.contiguous(), keys, width, sums.shape[1],
                BLOCK=block,
            )  # fmt: skip
        return
    # Temporary bytes per list entry: validity, masked and int64 indices, two results.
    step = items_within(workspace_bytes, width * 24)
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        valid = valid_entries(indices[part], None if length is None else length[part], keys)
        found = sums[part, :width]
        if slots is not None:
            found = sums[part].gather(1, torch.where(valid, slots[part], 0).long())
        out[part] = torch.where(valid, found, 0.0)


# Varying sizes must not trigger recompilation.
@triton.jit(do_not_specialize=[
    "out", "sums", "slots", "indices", "length", "keys", "width", "stride",
])  # fmt: skip
def _order(out, sums, slots, indices, length, keys, width, stride, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < width
    key = tl.load(indices + query * width + entry, mask=inside, other=-1)
    valid = (key >= 0) & (key < keys)
    if length is not None:
        valid &= entry < tl.load(length + query)
    slot = entry
    if slots is not None:
        slot = tl.load(slots + query * width + entry, mask=valid, other=0)
    found = tl.load(sums + query * stride + slot, mask=valid, other=0.0)
    tl.store(out + query * width + entry, found, mask=inside)
