"""Index lists of hybrid attention, stated as plainly as possible."""

import torch

from megatron_dsa.ops.key_lists.inputs import ListProblem


def build(problem: ListProblem):
    """Return ``indices`` int32 ``[rows, width]`` and ``length`` int32 ``[rows]``."""
    indices = torch.full((problem.start.shape[0], problem.width), -1, dtype=torch.int32)
    length = torch.zeros(problem.start.shape[0], dtype=torch.int32)
    for row in range(problem.start.shape[0]):
        if problem.selected is not None:
            slots = [slot for slot in problem.selected[row].tolist() if slot >= 0]
            if problem.selected_length is not None:
                slots = slots[: int(problem.selected_length[row])]
        elif problem.group_start is not None:
            slots = list(range(int(problem.group_start[row]), int(problem.group_end[row])))
        else:
            slots = []
        start, end = int(problem.start[row]), int(problem.end[row])
        own = list(range(start, end))[max(0, end - start - min(problem.window, problem.width)) :]
        if problem.key_rows is not None:
            own = [int(problem.key_rows[slot]) for slot in own]
        slots = slots[: problem.width - len(own)]
        entries = slots + [problem.offset + slot for slot in own]
        indices[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        length[row] = len(entries)
    return indices.to(problem.start.device), length.to(problem.start.device)
