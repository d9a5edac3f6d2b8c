"""Selection block by block: score some queries against what they may see, keep their best keys."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_dsa.numerics.arithmetic import rows_in_budget
from megatron_dsa.ops.indexer_topk.inputs import TopKProblem
from megatron_dsa.sequence.layout import Block, Seen


class Selector(Protocol):
    """How the best keys of a block are found (:mod:`megatron_dsa.ops.indexer_topk.select`)."""

    #: Blocks end where queries begin to see as many slots (:meth:`Window.bound`), or ``None``.
    cut: int | None

    def bytes_per_row(self, width: int) -> int:
        """Temporary bytes per query of a block ``width`` slots wide, the result included."""

    def __call__(self, block: Block, seen: Seen) -> torch.Tensor:
        """Return int32 ``[rows, topk]``: ascending columns of the block, then -1.

        The block is wider than ``topk``.
        """


@torch.no_grad()
def select_blocks(
    problem: TopKProblem, select: Selector, workspace_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indices`` int32 ``[Sq, K]`` (rows of the key buffer, ascending slots, -1 padded) and
    ``length`` int32 ``[Sq]``, the number of valid entries.

    Args:
        problem: what to select from.
        select: finds the best keys of a block.
        workspace_bytes: budget for the temporaries of one block.
    """
    inputs, layout, topk = problem.inputs, problem.layout, problem.topk
    device = inputs.q.device
    indices = torch.full((inputs.q.shape[0], topk), -1, dtype=torch.int32, device=device)
    length = torch.clamp(layout.end - layout.start, max=topk)

    def rows_for_width(width: int) -> int:
        return rows_in_budget(workspace_bytes, select.bytes_per_row(width))

    for block in layout.blocks(rows_for_width, select.cut):
        seen = layout.seen(block)
        if block.width <= topk:
            slots = seen.first(topk)  # everything that is visible is selected
        else:
            slots = select(block, seen)
        if block.lo:
            slots = torch.where(slots < 0, slots, slots + block.lo)
        indices[block.rows] = layout.to_key_rows(slots)
    return indices, length
