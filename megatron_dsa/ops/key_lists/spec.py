"""V4's key lists: inputs, implementations, reference."""

from dataclasses import dataclass

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON

_HERE = __package__


@dataclass(frozen=True, eq=False)
class ListInputs:
    """Ranges and selections of a block of query tokens.

    A list has ``n`` compressed slots, then ascending indices into the key buffer for the last ``w =
    min(window, end - start)`` of the slots ``[start, end)``, then -1. A list that exceeds ``width``
    drops its last compressed entries. Implementations return ``indices`` int32 ``[tokens, width]``
    and ``length`` int32 ``[tokens]``. Tensors may be slices with step 1.

    Attributes:
        key_indices: int64 ``[slots]``, slot -> key index past ``offset``; ``None``: identity.
        selected_length: ``None``: count the entries of ``selected`` that are not negative.
        group_start, group_end: int32 ``[tokens]``: without ``selected``, lists have all compressed
            slots ``[group_start, group_end)``; both ``None``: no compressed keys.
    """

    start: torch.Tensor
    end: torch.Tensor
    window: int
    key_indices: torch.Tensor | None
    offset: int
    selected: torch.Tensor | None
    selected_length: torch.Tensor | None
    group_start: torch.Tensor | None
    group_end: torch.Tensor | None
    width: int


KEY_LISTS = Operation(
    "key_lists",
    "lists of window and compressed keys",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton:build",
            Support(covers="one launch for any ratio", package=TRITON, **PORTABLE),
        ),
        Candidate("torch", f"{_HERE}.torch:build", Support(covers="any shape"), fused=False),
    ),
    fake=f"{_HERE}.spec:fake_lists",
)


def fake_lists(_candidate: Candidate, inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens,) = inputs.start.shape
    return inputs.start.new_empty(tokens, inputs.width), inputs.start.new_empty(tokens)


def plain_lists(inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = inputs.start.shape[0]
    indices = torch.full((tokens, inputs.width), -1, dtype=torch.int32)
    length = torch.zeros(tokens, dtype=torch.int32)
    for token in range(tokens):
        if inputs.selected is not None:
            slots = [slot for slot in inputs.selected[token].tolist() if slot >= 0]
            if inputs.selected_length is not None:
                slots = slots[: int(inputs.selected_length[token])]
        elif inputs.group_start is not None:
            assert inputs.group_end is not None
            slots = list(range(int(inputs.group_start[token]), int(inputs.group_end[token])))
        else:
            slots = []
        start, end = int(inputs.start[token]), int(inputs.end[token])
        near = list(range(start, end))[max(0, end - start - min(inputs.window, inputs.width)) :]
        if inputs.key_indices is not None:
            near = [int(inputs.key_indices[slot]) for slot in near]
        slots = slots[: inputs.width - len(near)]
        entries = slots + [inputs.offset + slot for slot in near]
        indices[token, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        length[token] = len(entries)
    return indices.to(inputs.start.device), length.to(inputs.start.device)
