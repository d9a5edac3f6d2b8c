"""Quality metrics of a selection: recall, overlap, captured mass.

The functions need no Megatron and no host synchronisation. They return one value per query, NaN
where undefined. *Lists* are int32 ``[r, K]``: distinct key indices in any order; negative entries
select nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    bmm,
    items_within,
    mm,
    slices,
)
from megatron_dsa.ops.common.checks import require_scale
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.indexer_topk.torch import block_scores
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.sparse_attention.mapped import MappedQueries


class Mean(NamedTuple):
    """Mean, stored as a sum and a count."""

    total: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # tuples have a method ``count``

    @property
    def value(self) -> torch.Tensor:
        """Mean, or NaN if the count is 0."""
        return self.total / self.count

    @classmethod
    def of(cls, values: torch.Tensor, counted: torch.Tensor | None = None) -> Mean:
        """Return the mean of the entries marked in ``counted``.

        Args:
            values: one or more per token.
            counted: bool, broadcast to ``values``; ``None`` marks all that are not NaN.
        """
        counted = ~values.isnan() if counted is None else counted.expand_as(values)
        return cls(torch.where(counted, values, 0.0).sum(), counted.sum())


def recall(selected: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``[r]``, the share of ``reference``'s keys that ``selected`` contains.

    Args:
        selected, reference: lists ``[r, K]`` and ``[r, K']`` of the same queries.

    Raises:
        ConfigError: lists are not int32, or have different numbers of queries.
    """
    for name, lists in (("selected", selected), ("reference", reference)):
        require(
            lists.dim() == 2 and lists.dtype == torch.int32 and lists.shape[1] > 0,
            f"{name} must be int32 [queries, K] with K > 0, got {lists.dtype} {tuple(lists.shape)}",
        )
    require(
        len(selected) == len(reference),
        f"selected and reference must have the same queries, got {len(selected)} and "
        f"{len(reference)}: take the queries that both have",
    )
    ordered = selected.sort(dim=-1).values
    wanted = reference.contiguous()
    index = torch.searchsorted(ordered, wanted).clamp_max_(ordered.shape[1] - 1)
    valid = wanted >= 0
    found = (ordered.gather(1, index) == wanted) & valid
    return found.sum(-1).float() / valid.sum(-1)


def adjacent_overlap(
    indices: torch.Tensor, layout: Layout, queries: torch.Tensor | None = None
) -> torch.Tensor:
    """Return fp32 ``[r]``, the share of a query's keys that the previous query also selected.

    It is NaN if no previous query exists on this rank, or nothing is selected.

    Args:
        indices: lists ``[num_queries, K]``.
        layout: positions of the queries, also for compressed keys.
        queries: int64 ``[r]``; default: all.
    """
    require(
        len(indices) == layout.num_queries,
        f"indices must have the {layout.num_queries} queries of the layout, got {len(indices)}",
    )
    if queries is None:
        queries = torch.arange(layout.num_queries, device=indices.device)
    # Sequences of an unpacked batch alternate token by token.
    before = queries - layout.query_ranges[0].tokens.step
    exists = before >= 0
    before = before.clamp_min(0)
    exists &= layout.start[before] == layout.start[queries]
    exists &= layout.position[before] == layout.position[queries] - 1
    exists &= layout.end[queries] > layout.start[queries]
    return torch.where(exists, recall(indices[before], indices[queries]), float("nan"))


def visible_keys(layout: Layout, queries: torch.Tensor) -> torch.Tensor:
    """Return bool ``[r, num_keys]``, which marks keys visible to the queries."""
    # The key buffer may hold invisible keys.
    slots = layout.slots_of_keys()
    return (slots >= layout.start[queries, None]) & (slots < layout.end[queries, None])


@torch.no_grad()
def captured_mass(
    q: torch.Tensor | MappedQueries,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor,
    layout: Layout,
    *,
    softmax_scale: float,
    k_pe: torch.Tensor | None = None,
    w_uk: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """Return ``[r, H]``, dense attention's probability on the attended keys.

    It is NaN for queries that see no key.

    Args:
        q, kv: ``[Sq, H, D]`` and ``[Skv, D]`` of sparse attention; with ``k_pe``, ``kv [Skv, H,
            Dk]`` of masked dense attention; with ``w_uk``, ``q [Sq, H, A + P]``, not absorbed, and
            latents ``kv [Skv, R + P]``.
        indices: int32 ``[Sq, K]``, attended keys; negative: none.
        lse: ``[Sq, H]``, natural log of the softmax denominator.
        layout: visible keys per query.
        softmax_scale: factor on ``q . kv``.
        k_pe: ``[Skv, R]``, rope key of masked dense attention, for the last dims of ``q``.
        w_uk: ``[H, A, R]``, key up projection of absorbed attention.
        queries: int64 ``[r]``; default: all.
        workspace_bytes: budget for temporary memory.
    """
    require_scale(softmax_scale)
    if queries is None:
        queries = torch.arange(layout.num_queries, device=q.device)
    shares = torch.full((len(queries), q.shape[1]), float("nan"), dtype=lse.dtype, device=q.device)
    bytes_per_query = 3 * layout.num_keys * accumulation_dtype(q.dtype).itemsize
    # The matrix product copies masked attention's keys.
    bytes_per_head = 0 if k_pe is None else layout.num_keys * q.shape[2] * 4
    for block in slices(len(queries), items_within(workspace_bytes, bytes_per_query)):
        some = queries[block]
        visible = visible_keys(layout, some)
        missed = visible & ~_selected(indices[some], layout.num_keys)
        bytes_per_block = bytes_per_query * len(some) + bytes_per_head
        heads_at_once = items_within(workspace_bytes, bytes_per_block)
        of_queries = q[some]
        for heads in slices(q.shape[1], heads_at_once):
            block_q = of_queries[:, heads].transpose(0, 1)
            if w_uk is not None:
                q_nope, rope = block_q.split([w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=-1)
                block_q = torch.cat([torch.bmm(q_nope, w_uk[heads]), rope], dim=-1)
            if k_pe is None:
                logits = _shared_key_logits(block_q, kv)
            else:
                nope, rope = block_q.split([q.shape[2] - k_pe.shape[1], k_pe.shape[1]], dim=-1)
                logits = _shared_key_logits(rope, k_pe)
                logits += bmm(nope, kv[:, heads, : nope.shape[2]].permute(1, 2, 0))
            logits.mul_(softmax_scale)
            missed_lse = torch.logsumexp(logits.masked_fill_(~missed, float("-inf")), dim=-1).t()
            share = torch.sigmoid(lse[some][:, heads] - missed_lse)
            seen = visible.any(-1, keepdim=True)
            shares[block, heads] = torch.where(seen, share, float("nan"))
    return shares


def _shared_key_logits(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return mm(q.flatten(0, 1), keys.t()).unflatten(0, q.shape[:2])


def _selected(indices: torch.Tensor, keys: int) -> torch.Tensor:
    mask = torch.zeros(len(indices), keys + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, torch.where(indices < 0, keys, indices).long(), True)[:, :keys]


@torch.no_grad()
def query_scores(
    inputs: IndexerInputs,
    queries: torch.Tensor,
    *,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """Return the index scores ``[r, Skv]`` of some queries, fp32 (fp64 for fp64 inputs).

    Invisible keys are also scored.

    Args:
        inputs: the indexer's tensors.
        queries: int64 ``[r]``.
        workspace_bytes: budget for temporary memory, without the result.
    """
    sampled = IndexerInputs(
        inputs.q[queries].detach(), inputs.k, inputs.weights[queries], inputs.relu
    )
    number, heads, dim = sampled.q.shape
    itemsize = accumulation_dtype(inputs.q.dtype).itemsize
    keys_at_once = items_within(workspace_bytes, itemsize * (2 * number * heads + 4 * dim))
    scores = [
        block_scores(sampled, slice(None), keys.detach(), heads)
        for keys in inputs.k.split(keys_at_once)
    ]
    return torch.cat(scores, 1)


def chooses(layout: Layout, queries: torch.Tensor, topk: int) -> torch.Tensor:
    """Return bool ``[r]``, which marks queries that see more keys than they select."""
    return layout.end[queries] - layout.start[queries] > topk
