"""Cheap metrics about the selection, measured on a few queries, once per iteration.

* attention mass captured: the share of the *dense* attention's probability that lies on the
  attended keys (mean over sampled queries and local heads). Falls when the indexer loses track. In
  V4's attention, window and sink count as attended to.
* zero scores: the share of visible index scores that are exactly 0 (all relus closed). A large
  share means that ties, not scores, decide the selection.
* boundary ties: the share of queries whose last selected score equals a rejected one.
* query overlap: the share of a query's keys that the query before selected as well. How far
  lists of neighbouring queries could be shared.
* layer overlap: the share of a query's keys that the layer before selected as well.

All but the first two are means over queries that see more keys than they select: others have no
choice. The functions behind them are in :mod:`megatron_dsa.metrics.quality`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_dsa.layers.parallel.groups import gather_tokens
from megatron_dsa.metrics.quality import (
    Mean,
    adjacent_overlap,
    captured_mass,
    chooses,
    query_scores,
    recall,
    visible_keys,
)
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.indexer_loss.spec import ExpandedKeys, LatentKeys, TeacherKeys
from megatron_dsa.ops.indexer_loss.training import TrainedIndexer
from megatron_dsa.ops.layout.layout import Layout


def sampled_queries(layout: Layout, count: int) -> torch.Tensor:
    """Return :func:`sample_queries` of a layout, formed once for all layers."""
    device = layout.start.device
    return layout.derive(
        ("sampled queries", count), lambda: sample_queries(layout.num_queries, count, device)
    )


def sample_queries(num_queries: int, count: int, device) -> torch.Tensor:
    """Return up to ``count`` queries, evenly spread, the last one included."""
    count = min(count, num_queries)
    return ((torch.arange(1, count + 1, device=device) * num_queries) // count) - 1


@dataclass(frozen=True, eq=False)
class Attended:
    """What a layer selected and attended to.

    Attributes:
        inputs: the indexer's tensors.
        layout, topk: as given to the selection.
        positions: the layout of positions, which is ``layout`` unless keys are compressed.
        q, kv: ``[Sq, H, D]`` and ``[Skv, D]`` of sparse attention, ``Skv`` the keys of the
            indexer; ``kv [Skv, H, Dk]`` of masked dense attention; ``q [Sq, H, A + P]`` and latents
            ``kv [Skv, R + P]`` of absorbed attention.
        indices: int32 ``[Sq, K]``, the selected key rows.
        lse: ``[Sq, H]``, log of all mass that the attention had in its denominator.
        softmax_scale: factor on ``q . kv``.
        k_pe: ``[Skv, R]``, the rope key of masked dense attention; ``None`` otherwise.
        w_uk: ``[H, A, R]``, what makes keys of latents in absorbed attention; ``None`` otherwise.
        group: ranks that have ``H / ranks`` heads of ``w_uk`` each, or ``None``.
    """

    inputs: TrainedIndexer
    layout: Layout
    topk: int
    positions: Layout
    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    k_pe: torch.Tensor | None = None
    w_uk: torch.Tensor | None = None
    group: Any = None

    @cached_property
    def weights(self) -> torch.Tensor | None:
        """``w_uk`` of all heads; gathered when it is first asked for."""
        return None if self.w_uk is None else gather_tokens(self.w_uk, self.group)

    def keys(self) -> TeacherKeys:
        """Return the keys ``[Skv, 1, D]`` that all heads share, or keys of every head."""
        if self.weights is not None:
            return LatentKeys(self.kv, self.weights)
        if self.k_pe is None:
            return self.kv[:, None]
        nope = self.q.shape[2] - self.k_pe.shape[1]
        return ExpandedKeys(self.kv, self.k_pe, self.kv.shape[2] - nope)


@torch.no_grad()
def selection_health(attended: Attended, count: int, workspace_bytes: int) -> dict[str, Mean]:
    """Measure the metrics (on the device, no synchronisation).

    Args:
        attended: selection and attention of a layer.
        count: number of queries to sample.
        workspace_bytes: budget for temporary memory.
    """
    layout, topk, inputs = attended.layout, attended.topk, attended.inputs.formed()
    queries = sampled_queries(layout, count)
    captured = captured_mass(
        attended.q, attended.kv, attended.indices, attended.lse, layout,
        softmax_scale=attended.softmax_scale, k_pe=attended.k_pe, w_uk=attended.weights,
        queries=queries, workspace_bytes=workspace_bytes,
    )  # fmt: skip

    visible = visible_keys(layout, queries)
    scores = query_scores(inputs, queries, workspace_bytes=workspace_bytes)
    zero = Mean(((scores == 0) & visible).sum(), visible.sum())
    ranked = scores.masked_fill(~visible, float("-inf"))
    kth = torch.topk(ranked, min(topk, ranked.shape[1]), dim=-1).values[:, -1:]
    rejects = chooses(layout, queries, topk)
    tied = rejects & (((ranked >= kth) & visible).sum(-1) > topk)

    overlap = adjacent_overlap(attended.indices, attended.positions, queries)
    return {
        # An attention that is NaN is not left out.
        "dsa attention mass captured": Mean.of(captured, visible.any(-1, keepdim=True)),
        "dsa zero scores": zero,
        "dsa boundary ties": Mean(tied.sum(), rejects.sum()),
        "dsa query overlap": Mean.of(torch.where(rejects, overlap, float("nan"))),
    }


#: Name of the figure in the log line.
LAYER_OVERLAP = "dsa layer overlap"


@dataclass(frozen=True)
class _Left:
    owner: object
    layer: int
    forwards: int
    keys: torch.Tensor


class LayerOverlap:
    """How much of a layer's selection the selecting layer before it had selected as well.

    Layers of a pipeline stage run one after the other for a microbatch. A layer leaves the keys of
    its sampled queries behind, and the next selecting layer of the same kind compares them with its
    own. Nothing else is held, and nothing travels between ranks: the first selecting layer of a
    stage has no figure, nor have layers of multi-token prediction, whose queries are other tokens.

    Args:
        owner: object that all layers of a model share (their configuration).
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
            indices: int32 ``[Sq, K]``, key rows.
            layout, topk: as given to the selection.
            count: number of queries to sample.
        """
        if in_backward():
            return {}
        self.forwards += 1
        left = LayerOverlap._left
        queries = sampled_queries(layout, count)
        keys = indices[queries]
        LayerOverlap._left = _Left(self.owner, self.layer, self.forwards, keys)
        if left is None or left.owner is not self.owner or left.layer != self.before:
            return {}
        # Every layer sees every microbatch once and in order: equal counts are the same one. An
        # interleaved schedule may put forwards of other microbatches between two layers.
        if left.forwards != self.forwards:
            return {}
        share = recall(left.keys, keys)
        return {
            LAYER_OVERLAP: Mean.of(torch.where(chooses(layout, queries, topk), share, float("nan")))
        }
