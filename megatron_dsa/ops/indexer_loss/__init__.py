"""KL divergence from the attention's own distribution to the indexer's (DeepSeek-V3.2, eq. 4, 5).

Both losses return the *sum* over query rows of ``KL(teacher || student)``; the mean, the
coefficient and the scale of an auxiliary loss are applied by the caller. Because the gradient of a
row is ``student - teacher``, value and gradients come out of one pass: the gradients are formed in
the forward and only multiplied by a number in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.layout import Layout
from megatron_dsa.ops.indexer_topk import IndexerInputs


@dataclass(frozen=True)
class SparseLossProblem:
    """Loss over the selected keys.

    Attributes:
        inputs: the indexer's tensors; gradients flow to q, k and weights.
        indices: int32 ``[Sq, K]``, rows of ``inputs.k``; -1 (or out of range) selects nothing.
        topk_length: int32 ``[Sq]`` or ``None``.
        teacher: ``[Sq, K]``, attention probabilities summed over all heads (of all tensor-parallel
            ranks), not yet normalised. Rows that sum to 0 contribute nothing.
        workspace_bytes: budget for temporary memory.
    """

    inputs: IndexerInputs
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor
    workspace_bytes: int


@dataclass(frozen=True)
class DenseLossProblem:
    """Loss over all visible keys.

    Attributes:
        inputs: the indexer's tensors; gradients flow to q, k and weights.
        layout: which slots each query row sees.
        q: ``[Sq, H, D]`` and k: ``[Skv, Hk, D]`` with ``Hk`` 1 or ``H``: what the attention scores
            are made of (the teacher). No gradient flows to them.
        softmax_scale: factor on ``q . k``.
        head_group: process group over which the teacher's head sum is completed, or ``None``.
        workspace_bytes: budget for temporary memory.
    """

    inputs: IndexerInputs
    layout: Layout
    q: torch.Tensor
    k: torch.Tensor
    softmax_scale: float
    head_group: object | None
    workspace_bytes: int
