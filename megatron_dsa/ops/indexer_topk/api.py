"""Select the best visible keys of every query."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Policy
from megatron_dsa.errors import require
from megatron_dsa.ops.indexer_topk.finite import require_finite_scores
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs, TopKProblem, check_indexer
from megatron_dsa.ops.indexer_topk.select import select_blocks, selector
from megatron_dsa.sequence.layout import Layout


def indexer_topk(
    inputs: IndexerInputs, layout: Layout, topk: int, *, policy: Policy = Policy()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``min(topk, visible)`` best visible keys of every query row.

    Scores are ``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` in fp32. The selection is exact
    and deterministic; equal scores go to the key that comes first in its sequence. With
    ``policy.fp8_selection`` a key that fp8 scores put far behind may be missed
    (:class:`megatron_dsa.ops.indexer_topk.select.Candidates`).

    Args:
        inputs: see :class:`IndexerInputs`.
        layout: which keys each query row sees.
        topk: keys per query, at least 1.
        policy: which implementations may run.

    Returns:
        ``indices`` int32 ``[Sq, topk]``: rows of the key buffer in sequence order, then ``-1``;
        ``length`` int32 ``[Sq]``: number of valid entries. Not differentiable.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, a layout of other tensors, or scores
            that are NaN or infinite; on a GPU the latter is a device assert, which ends the
            process at its next synchronisation.
    """
    check_indexer(inputs, layout)
    require(topk >= 1, f"topk must be at least 1, got {topk}")
    inputs = require_finite_scores(inputs, layout, "indexer_topk")
    problem = TopKProblem(inputs.detach(), layout, topk)
    return select_blocks(problem, selector(problem, policy), policy.workspace_bytes)
