"""Selection block by block: score some queries against what they may see, keep their best keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_dsa.ops.arithmetic import rows_in_budget
from megatron_dsa.ops.indexer_topk import TopKProblem
from megatron_dsa.ops.indexer_topk.unfused import ascending

#: Bytes per score that a selection may take besides the scores: sorted copies, counters, masks.
_SELECTION_BYTES = 32


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
        select: ``(scores [r, w], visible [r, w], topk) -> slots`` int32 ``[r, topk]``, ascending
            columns of the block, then -1.
        bytes_per_score: what ``scores`` takes for one score.
        workspace_bytes: budget for the temporaries of one block.
    """
    inputs, layout, topk = problem.inputs, problem.layout, problem.topk
    device = inputs.q.device
    indices = torch.full((inputs.q.shape[0], topk), -1, dtype=torch.int32, device=device)
    length = torch.clamp(layout.end - layout.start, max=topk)
    keys = layout.keys_in_slot_order(inputs.k)
    per_score = bytes_per_score + _SELECTION_BYTES

    def rows_for_width(width: int) -> int:
        return rows_in_budget(workspace_bytes, width * per_score)

    for block in layout.blocks(rows_for_width):
        visible = layout.visible(block)
        if block.width <= topk:
            slots = ascending(visible, topk)  # everything that is visible is selected
        else:
            block_scores = scores(inputs, block, keys).masked_fill_(~visible, float("-inf"))
            slots = select(block_scores, visible, topk)
        slots = torch.where(slots < 0, slots, slots + block.lo)
        indices[block.rows] = layout.to_key_rows(slots)
    return indices, length
