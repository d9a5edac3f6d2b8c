"""The lightning indexer: score every visible key, keep the best (DeepSeek-V3.2, eq. 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.layout import Layout


@dataclass(frozen=True)
class IndexerInputs:
    """What an index score is made of.

    Attributes:
        q: ``[Sq, HI, DI]``, one query per index head.
        k: ``[Skv, DI]``, one key shared by all index heads.
        weights: ``[Sq, HI]``, head weights with ``HI^-1/2 * DI^-1/2`` already in them.
        relu: clamp each head's product at 0 (DeepSeek) or leave it.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True

    def detach(self) -> IndexerInputs:
        """Return the same inputs outside of the autograd graph."""
        return IndexerInputs(self.q.detach(), self.k.detach(), self.weights.detach(), self.relu)


@dataclass(frozen=True)
class TopKProblem:
    """Inputs of one selection: the indexer's, the layout, ``topk`` and the workspace budget."""

    inputs: IndexerInputs
    layout: Layout
    topk: int
    workspace_bytes: int
