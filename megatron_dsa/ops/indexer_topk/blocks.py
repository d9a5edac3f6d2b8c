"""Selection block by block: score some queries against what they may see, keep their best keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_dsa.ops.arithmetic import rows_in_budget
from megatron_dsa.ops.indexer_topk import TopKProblem


@torch.no_grad()
def select_blocks(
    problem: TopKProblem,
    scores: Callable,
    select: Callable,
    bytes_per_score: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indices`` int32 ``[Sq, K]`` (rows of the key buffer, ascending slots, -1 padded) and
    ``length`` int32 ``[Sq]``, the number of valid entries.

    Args:
        problem: what to select from.
        scores: called as :class:`~megatron_dsa.ops.indexer_topk.BlockScores`.
        select: called as :class:`~megatron_dsa.ops.indexer_topk.BlockSelection`.
        bytes_per_score: what both take for one score, the score included.
        workspace_bytes: budget for the temporaries of one block.
    """
    inputs, layout, topk = problem.inputs, problem.layout, problem.topk
    device = inputs.q.device
    indices = torch.full((inputs.q.shape[0], topk), -1, dtype=torch.int32, device=device)
    length = torch.clamp(layout.end - layout.start, max=topk)
    keys = layout.keys_in_slot_order(inputs.k)

    def rows_for_width(width: int) -> int:
        return rows_in_budget(workspace_bytes, width * bytes_per_score)

    for block in layout.blocks(rows_for_width):
        seen = layout.seen(block)
        if block.width <= topk:
            slots = seen.first(topk)  # everything that is visible is selected
        else:
            slots = select(scores(inputs, block, keys, seen), seen, topk)
        if block.lo:
            slots = torch.where(slots < 0, slots, slots + block.lo)
        indices[block.rows] = layout.to_key_rows(slots)
    return indices, length
