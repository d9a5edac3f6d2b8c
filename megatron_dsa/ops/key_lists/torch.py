"""Key lists of V4's attention in torch."""

import torch

from megatron_dsa.ops.key_lists.spec import ListInputs


def build(inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    start, end, width, selected = inputs.start, inputs.end, inputs.width, inputs.selected
    near = (end - start).clamp(0, min(inputs.window, width))
    if selected is not None:
        count = inputs.selected_length
        if count is None:
            count = (selected >= 0).sum(1, dtype=torch.int32)
        count = count.clamp(0, selected.shape[1])
    elif inputs.group_start is not None:
        assert inputs.group_end is not None
        count = (inputs.group_end - inputs.group_start).clamp_min(0)
    else:
        count = torch.zeros_like(near)
    count = torch.minimum(count, width - near)
    length = count + near

    column = torch.arange(width, dtype=torch.int32, device=start.device)
    slot = column + (end - length)[:, None]  # list entry ``count + j`` is slot ``end - near + j``
    if inputs.key_indices is not None and inputs.key_indices.numel() > 0:
        slot = inputs.key_indices[slot.clamp(0, inputs.key_indices.shape[0] - 1)]
    indices = torch.where(column < length[:, None], slot + inputs.offset, -1).int()
    if selected is not None:
        columns = min(width, selected.shape[1])
        part, chosen = indices[:, :columns], selected[:, :columns]
        torch.where(column[:columns] < count[:, None], chosen, part, out=part)
    elif inputs.group_start is not None:
        groups = column + inputs.group_start[:, None]
        torch.where(column < count[:, None], groups, indices, out=indices)
    return indices, length.int()
