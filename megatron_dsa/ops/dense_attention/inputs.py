"""Causal attention over all visible keys, used by the ``dense`` and ``warmup`` stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.sequence.layout import Layout


@dataclass(frozen=True)
class DenseProblem:
    """Inputs of one dense attention.

    Attributes:
        q: ``[Sq, H, D]``; k: ``[Skv, H, D]``; v: ``[Skv, H, Dv]``, rows as in ``layout``.
        layout: which slots each query row sees.
        softmax_scale: factor on ``q . k``.
        workspace_bytes: budget for temporary memory.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Layout
    softmax_scale: float
    workspace_bytes: int
