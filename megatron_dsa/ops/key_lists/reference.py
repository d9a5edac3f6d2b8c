"""Index lists of V4's attention, stated as plainly as possible."""

import torch

from megatron_dsa.ops.key_lists.api import ListInputs


def build(inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indices`` int32 ``[rows, width]`` and ``length`` int32 ``[rows]``."""
    indices = torch.full((inputs.start.shape[0], inputs.width), -1, dtype=torch.int32)
    length = torch.zeros(inputs.start.shape[0], dtype=torch.int32)
    for row in range(inputs.start.shape[0]):
        if inputs.selected is not None:
            slots = [slot for slot in inputs.selected[row].tolist() if slot >= 0]
            if inputs.selected_length is not None:
                slots = slots[: int(inputs.selected_length[row])]
        elif inputs.group_start is not None:
            assert inputs.group_end is not None
            slots = list(range(int(inputs.group_start[row]), int(inputs.group_end[row])))
        else:
            slots = []
        start, end = int(inputs.start[row]), int(inputs.end[row])
        own = list(range(start, end))[max(0, end - start - min(inputs.window, inputs.width)) :]
        if inputs.key_rows is not None:
            own = [int(inputs.key_rows[slot]) for slot in own]
        slots = slots[: inputs.width - len(own)]
        entries = slots + [inputs.offset + slot for slot in own]
        indices[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        length[row] = len(entries)
    return indices.to(inputs.start.device), length.to(inputs.start.device)
