"""How much of a layer's selection the selecting layer before it had selected as well.

Layers of a pipeline stage run one after the other for a microbatch, so a layer leaves the keys of
its sampled rows behind and the next selecting one of the same kind compares them with its own.
Nothing else is held, and nothing travels between ranks: the first selecting layer of a stage has
no figure. Layers of multi-token prediction, whose rows stand for other tokens, take no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.metrics.health import sample_rows
from megatron_dsa.metrics.quality import Mean, chooses, recall
from megatron_dsa.numerics.autograd import in_backward
from megatron_dsa.sequence.layout import Layout

FIGURE = "dsa layer overlap"


@dataclass(frozen=True)
class _Left:
    owner: object
    layer: int
    forwards: int
    keys: torch.Tensor


class LayerOverlap:
    """One layer's part in the comparison.

    Args:
        owner: what the layers of one model have in common (their configuration).
        layer: number of this layer; before: that of the selecting layer before it, or ``None``.
    """

    _left: _Left | None = None  # by the selecting layer that ran last in this process

    def __init__(self, owner: object, layer: int, before: int | None):
        self.owner, self.layer, self.before = owner, layer, before
        self.forwards = 0

    @torch.no_grad()
    def compare(
        self, indices: torch.Tensor, layout: Layout, topk: int, count: int
    ) -> dict[str, Mean]:
        """Leave this layer's keys behind; return the figure, if there is something to compare.

        To be called once per forward pass. When a recomputed layer runs again in the backward,
        the layer before it is another microbatch's or has not run yet: nothing is done.

        Args:
            indices: int32 ``[Sq, K]``, rows of the key buffer.
            layout, topk: as given to the selection.
            count: number of rows to sample.
        """
        if in_backward():
            return {}
        self.forwards += 1
        left = LayerOverlap._left
        rows = sample_rows(layout.num_queries, count, indices.device)
        keys = indices[rows]
        LayerOverlap._left = _Left(self.owner, self.layer, self.forwards, keys)
        if left is None or left.owner is not self.owner or left.layer != self.before:
            return {}
        # Every layer sees every microbatch once and in order: equal counts are the same one. An
        # interleaved schedule may put forwards of other microbatches between two layers.
        if left.forwards != self.forwards:
            return {}
        share = recall(left.keys, keys)
        return {FIGURE: Mean.of(torch.where(chooses(layout, rows, topk), share, float("nan")))}
