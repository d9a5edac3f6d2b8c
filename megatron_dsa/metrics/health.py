"""Selection metrics, sampled on a few queries per iteration.

* mass captured: share of *dense* attention's probability on attended keys (in V4 including window
  and sink); it falls if the indexer selects worse.
* query overlap: share of a query's keys that the previous query also selected, over queries that
  see more keys than they select.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_dsa.layers.parallel.groups import gather_detached
from megatron_dsa.metrics.quality import (
    Mean,
    adjacent_overlap,
    captured_mass,
    chooses,
    visible_keys,
)
from megatron_dsa.ops.indexer_loss.spec import ExpandedKeys, LatentKeys, TeacherKeys
from megatron_dsa.ops.indexer_loss.training import TrainedIndexer
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.sparse_attention.mapped import MappedQueries


def sampled_queries(layout: Layout, count: int) -> torch.Tensor:
    device = layout.start.device
    return layout.derive(
        ("sampled queries", count), lambda: sample_queries(layout.num_queries, count, device)
    )


def sample_queries(num_queries: int, count: int, device) -> torch.Tensor:
    """Return up to ``count`` evenly spread queries, including the last query."""
    count = min(count, num_queries)
    return ((torch.arange(1, count + 1, device=device) * num_queries) // count) - 1


@dataclass(frozen=True, eq=False)
class Attended:
    """Selection and attention of a layer.

    Attributes:
        inputs: the indexer's tensors.
        layout, topk: visible keys and size of the selection.
        positions: layout of positions; differs from ``layout`` for compressed keys.
        q, kv: ``[Sq, H, D]`` and ``[Skv, D]`` of sparse attention, ``Skv`` the indexer's keys; ``kv
            [Skv, H, Dk]`` of masked dense attention; ``q [Sq, H, A + P]`` and latents ``kv [Skv, R
            + P]`` of absorbed attention.
        indices: int32 ``[Sq, K]``, selected keys.
        lse: ``[Sq, H]``, log of the softmax denominator.
        softmax_scale: factor on ``q . kv``.
        k_pe: ``[Skv, R]``, rope key of masked dense attention, or ``None``.
        w_uk: ``[H, A, R]``, key up projection of absorbed attention, or ``None``.
        group: ranks with ``H / ranks`` heads of ``w_uk`` each, or ``None``.
    """

    inputs: TrainedIndexer
    layout: Layout
    topk: int
    positions: Layout
    q: torch.Tensor | MappedQueries
    kv: torch.Tensor
    indices: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    k_pe: torch.Tensor | None = None
    w_uk: torch.Tensor | None = None
    group: Any = None

    @cached_property
    def weights(self) -> torch.Tensor | None:
        """Key up projection of all heads, gathered on first use."""
        return None if self.w_uk is None else gather_detached(self.w_uk, self.group)

    def keys(self) -> TeacherKeys:
        """Return the keys ``[Skv, 1, D]`` shared by all heads, or keys per head."""
        if self.weights is not None:
            return LatentKeys(self.kv, self.weights)
        if self.k_pe is None:
            return self.kv[:, None]
        nope = self.q.shape[2] - self.k_pe.shape[1]
        return ExpandedKeys(self.kv, self.k_pe, self.kv.shape[2] - nope)


@torch.no_grad()
def selection_health(attended: Attended, count: int, workspace_bytes: int) -> dict[str, Mean]:
    """Compute selection metrics of ``count`` queries, without host synchronisation."""
    layout, queries = attended.layout, sampled_queries(attended.layout, count)
    captured = captured_mass(
        attended.q, attended.kv, attended.indices, attended.lse, layout,
        softmax_scale=attended.softmax_scale, k_pe=attended.k_pe, w_uk=attended.weights,
        queries=queries, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    sees_keys = visible_keys(layout, queries).any(-1, keepdim=True)
    overlap = adjacent_overlap(attended.indices, attended.positions, queries)
    chosen = chooses(layout, queries, attended.topk)
    return {
        # NaN in attention must make the metric NaN.
        "dsa attention mass captured": Mean.of(captured, sees_keys),
        "dsa query overlap": Mean.of(torch.where(chosen, overlap, float("nan"))),
    }
