"""The lightning indexer: score every visible key, keep the best (DeepSeek-V3.2, eq. 1 and 2).

Two operations work together on one block of queries at a time, so that scores never exist for all
pairs: ``indexer_scores`` (:class:`BlockScores`) and ``indexer_topk``
(``select(scores, visible, topk) -> slots``). :mod:`.blocks` walks over the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_dsa.layout import Block, Layout


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
    """Inputs of one selection: the indexer's, the layout and ``topk``."""

    inputs: IndexerInputs
    layout: Layout
    topk: int


class BlockScores(Protocol):
    """An implementation of ``indexer_scores``."""

    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        """Temporary bytes per score, the score included (``itemsize`` bytes), for the budget."""

    def __call__(self, inputs: IndexerInputs, block: Block, keys: torch.Tensor) -> torch.Tensor:
        """Return the scores ``[rows, width]`` of the block's queries, fp32 (fp64 for fp64 inputs).

        ``keys [slots, DI]`` are all keys in slot order. Scores of slots that a query does not see
        may hold anything but NaN.
        """
