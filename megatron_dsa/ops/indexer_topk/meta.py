"""Index scores and their selection on the meta device."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.layout.blocks import Block, Seen
from megatron_dsa.ops.meta import empty_sums, take_workspace


def scores(
    _candidate: Candidate, inputs: IndexerInputs, block: Block, _keys: torch.Tensor, _seen: Seen
) -> torch.Tensor:
    """Meta function of ``indexer_scores``; ``SCORES.run`` calls it in a plan."""
    # q may be fp8; the weights never are.
    return empty_sums(inputs.weights, inputs.q[block.rows].shape[0], block.width)


def select(
    candidate: Candidate,
    scores: torch.Tensor,
    _seen: Seen,
    topk: int,
    _out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Meta function of ``indexer_topk``; ``TOPK.run`` calls it in a plan."""
    selection: Any = candidate.load()
    take_workspace(scores, scores.numel() * selection.bytes_per_score())
    return scores.new_empty(scores.shape[0], topk, dtype=torch.int32)
