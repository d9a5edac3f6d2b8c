"""Sorted key lists for backward kernels that scatter into the key gradient.

In sorted order, concurrent thread blocks add to the same, cached part of the key gradient.
"""

import torch

from megatron_dsa.ops.common.arithmetic import items_within, lengths, valid_entries
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs


def sorting_pays(inputs: SparseAttentionInputs) -> bool:
    if inputs.in_order:
        return False
    cache = torch.cuda.get_device_properties(inputs.kv.device).L2_cache_size
    return inputs.kv.numel() * 4 > cache // 2


def caller_lists(inputs: SparseAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    indices = inputs.indices.contiguous()
    return indices, lengths(indices, inputs.topk_length, inputs.length_in_range)


def ascending_lists(
    inputs: SparseAttentionInputs, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sorted lists without invalid entries; write each entry's new index to ``slots``."""
    indices, length = caller_lists(inputs)
    queries, width = indices.shape
    keys = inputs.kv.shape[0]
    ordered, count = torch.empty_like(indices), torch.empty_like(length)
    # Temporary bytes per list entry: validity, masked copy, sorted copy, int64 sort order.
    step = items_within(inputs.workspace_bytes, width * 24)
    for first in range(0, queries, step):
        part = slice(first, first + step)
        valid = valid_entries(indices[part], length[part], keys)
        ordered[part], order = torch.where(valid, indices[part], keys).sort(dim=1)
        count[part] = valid.sum(1)
        if slots is not None:
            goal = torch.arange(width, dtype=torch.int32, device=indices.device)
            slots[part].scatter_(1, order, goal.expand(order.shape))
    return ordered, count
