"""Cheap figures about the selection, measured on a few query rows of every microbatch.

* attention mass captured: the share of the *dense* attention's probability that lies on what is
  attended to (mean over sampled rows and local heads). Falls when the indexer loses track. In
  hybrid attention window and sink count as attended to.
* zero scores: the share of visible index scores that are exactly 0 (all relus closed). A large
  share means that ties, not scores, decide the selection.
* boundary ties: the share of rows whose last selected score equals a rejected one.
"""

from __future__ import annotations

import torch

from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.layout import Layout
from megatron_dsa.ops.arithmetic import accumulation_dtype, mm, rows_in_budget
from megatron_dsa.ops.indexer_topk.scores import block_scores, head_blocks


def sample_rows(num_queries: int, count: int, device) -> torch.Tensor:
    """Return up to ``count`` query rows, evenly spread, the last one included."""
    count = min(count, num_queries)
    return ((torch.arange(1, count + 1, device=device) * num_queries) // count) - 1


@torch.no_grad()
def selection_health(
    inputs: IndexerInputs,
    layout: Layout,
    topk: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    count: int,
    workspace_bytes: int,
) -> dict[str, torch.Tensor]:
    """Measure the three figures (scalars on the device, no synchronisation).

    Args:
        inputs: the indexer's tensors.
        layout, topk: as given to the selection.
        q, kv: ``[Sq, H, D]`` and ``[Skv, D]`` of the sparse attention, ``Skv`` the keys of the
            indexer.
        indices: int32 ``[Sq, K]``, the selection, rows of kv.
        lse: ``[Sq, H]``, log of all mass that the attention had in its denominator.
        softmax_scale: factor on ``q . kv``.
        count: number of rows to sample.
        workspace_bytes: budget for temporary memory.
    """
    rows = sample_rows(layout.num_queries, count, q.device)
    # Columns are rows of the key buffer, which may be large: only their slots are looked up.
    slots = layout.slots_of_key_rows()
    visible = (slots >= layout.start[rows, None]) & (slots < layout.end[rows, None])
    seen = visible.sum(-1)

    bytes_per_head = 3 * visible.numel() * accumulation_dtype(q.dtype).itemsize
    heads_at_once = rows_in_budget(workspace_bytes, bytes_per_head)
    sampled = IndexerInputs(inputs.q[rows], inputs.k, inputs.weights[rows], inputs.relu)
    scores = block_scores(sampled, slice(None), inputs.k, heads_at_once)
    zero = ((scores == 0) & visible).sum() / seen.sum().clamp_min(1)

    ranked = scores.masked_fill_(~visible, float("-inf"))
    kth = torch.topk(ranked, min(topk, ranked.shape[1]), dim=-1).values[:, -1:]
    rejects = seen > topk
    tied = rejects & (((ranked >= kth) & visible).sum(-1) > topk)
    ties = tied.sum() / rejects.sum().clamp_min(1)

    missed = visible & ~_selected(indices[rows], layout.num_keys)
    captured = q.new_zeros((), dtype=accumulation_dtype(q.dtype))
    for heads in head_blocks(q.shape[1], heads_at_once):
        block_q = q[rows][:, heads].transpose(0, 1)
        logits = mm(block_q.flatten(0, 1), kv.t()).unflatten(0, block_q.shape[:2])
        logits.mul_(softmax_scale)
        missed_lse = torch.logsumexp(logits.masked_fill_(~missed, float("-inf")), dim=-1).t()
        share = torch.sigmoid(lse[rows][:, heads] - missed_lse)
        captured += torch.where(seen[:, None] > 0, share, 0.0).sum()
    captured /= (seen > 0).sum().clamp_min(1) * q.shape[1]
    return {
        "dsa attention mass captured": captured,
        "dsa zero scores": zero,
        "dsa boundary ties": ties,
    }


def _selected(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return bool ``[r, keys]`` from key rows ``[r, K]``; negative ones select nothing."""
    mask = torch.zeros(len(indices), keys + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, torch.where(indices < 0, keys, indices).long(), True)[:, :keys]
