"""Score and select in torch: scores exist for one block of queries at a time.

The selection is exact and deterministic. ``torch.topk`` is used only for the k-th *value*: which
of several equal scores it picks is not defined. Ties go to the smallest slot.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.arithmetic import accumulation_dtype, rows_in_budget
from megatron_dsa.ops.indexer_topk import TopKProblem
from megatron_dsa.ops.indexer_topk.scores import block_scores

#: Index heads multiplied at a time: enough for a good matrix product, few enough for the budget.
HEADS_AT_ONCE = 8


@torch.no_grad()
def indexer_topk(problem: TopKProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indices`` int32 ``[Sq, K]`` (rows of the key buffer, ascending slots, -1 padded) and
    ``length`` int32 ``[Sq]``, the number of valid entries.
    """
    inputs, layout, topk = problem.inputs, problem.layout, problem.topk
    rows_total = inputs.q.shape[0]
    indices = torch.full((rows_total, topk), -1, dtype=torch.int32, device=inputs.q.device)
    length = torch.clamp(layout.end - layout.start, max=topk)
    keys = layout.keys_in_slot_order(inputs.k)
    acc = accumulation_dtype(inputs.q.dtype).itemsize
    heads_at_once = min(HEADS_AT_ONCE, inputs.q.shape[1])

    def rows_for_width(width: int) -> int:
        # products of some heads, the scores, and the selection's counters and masks
        return rows_in_budget(problem.workspace_bytes, width * (acc * (heads_at_once + 3) + 24))

    for block in layout.blocks(rows_for_width):
        visible = layout.visible(block)
        if block.width <= topk:
            mask = visible  # everything that is visible is selected
        else:
            scores = block_scores(inputs, block.rows, keys[block.lo : block.hi], heads_at_once)
            mask = select(scores.masked_fill_(~visible, float("-inf")), visible, topk)
        slots = _ascending(mask, topk)
        slots = torch.where(slots < 0, slots, slots + block.lo)
        indices[block.rows] = layout.to_key_rows(slots)
    return indices, length


def select(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Return bool ``[r, w]``: the ``min(topk, visible)`` best visible entries of each row.

    ``scores`` must be ``-inf`` where not visible. Exactly as many entries are set as asked for,
    with any number of equal scores.
    """
    kth = torch.topk(scores, min(topk, scores.shape[1]), dim=-1).values[:, -1:]
    better = scores > kth
    ties = (scores == kth) & visible
    room = topk - better.sum(-1, keepdim=True, dtype=torch.int32)
    return better | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room))


def _ascending(mask: torch.Tensor, topk: int) -> torch.Tensor:
    """Return int32 ``[r, topk]``: the set columns of each row in ascending order, then ``-1``."""
    place = mask.cumsum(-1, dtype=torch.int32) - 1
    # Unset columns are written to a spare column, which is cut off: no host synchronisation.
    place = torch.where(mask, place, topk).long()
    columns = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    out = torch.full((mask.shape[0], topk + 1), -1, dtype=torch.int32, device=mask.device)
    return out.scatter_(1, place, columns.expand_as(mask))[:, :topk]
