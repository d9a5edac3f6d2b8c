"""The teacher of the dense indexer loss on one tile: attention probabilities summed over heads."""

import torch

from megatron_dsa.ops.common.arithmetic import bmm, mm, slices
from megatron_dsa.ops.indexer_loss.inputs import TeacherKeys
from megatron_dsa.ops.indexer_loss.tiles import HEADS_AT_ONCE


def teacher_tile(
    q: torch.Tensor, keys: TeacherKeys, lse: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Return ``sum_h exp(softmax_scale * q_h . k_h - lse_h)`` as ``[r, w]``, fp32 (or fp64).

    Pairs that do not see each other are not masked and may hold anything, even inf.

    Args:
        q: ``[r, H, D]``.
        keys: ``[w, 1 or H, D]``, or what ``w`` keys are made of.
        lse: ``[H, r]``, fp32 (fp64).
        softmax_scale: factor on ``q . k``.
    """
    total = None
    for heads in slices(q.shape[1], HEADS_AT_ONCE):
        shift = -lse[heads, :, None]
        part = _add_scaled(shift, _head_scores(q, keys, heads), softmax_scale).exp_().sum(0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def teacher_lse(
    q: torch.Tensor,
    keys: TeacherKeys,
    hidden: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Return the log-sum-exp ``[H, r]`` of the teacher's scores over the keys of one tile.

    ``hidden`` is bool ``[r, w]``: pairs to leave out. The rest is as in :func:`teacher_tile`.
    """
    parts = (
        log_sum_exp(_head_scores(q, keys, heads), hidden, softmax_scale)
        for heads in slices(q.shape[1], HEADS_AT_ONCE)
    )
    return torch.cat(list(parts))


def log_sum_exp(scores: torch.Tensor, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return ``log(sum(exp(scale * scores)))`` over the last dim, ``-inf`` where all is hidden.

    ``scores [..., r, w]`` is overwritten; ``hidden`` is bool ``[r, w]``, ``scale`` positive.
    """
    peak = scores.masked_fill_(hidden, float("-inf")).amax(-1, keepdim=True)
    # -inf - -inf would be NaN.
    peak = peak.masked_fill_(peak == float("-inf"), 0.0).mul_(scale)
    total = _add_scaled(-peak, scores, scale).exp_().sum(-1)
    return total.log_().add_(peak.squeeze(-1))


def normalised_lse(
    lse: torch.Tensor, other_lse: torch.Tensor | None, group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``lse`` with which the tiles of a row, summed over heads and ranks, sum to 1.

    Args:
        lse: ``[H, r]``, over the visible keys.
        other_lse: ``[H, r]``, of what else is in the softmax's denominator, or ``None``.
        group: process group over which heads are sharded, or ``None``.

    Returns:
        ``[H, r]``, and bool ``[r]``: which rows have mass on visible keys. Others are not defined.
    """
    total = lse if other_lse is None else torch.logaddexp(lse, other_lse)
    # Without keys and without others, -inf - -inf would be NaN.
    mass = torch.where(lse == float("-inf"), 0.0, (lse - total).exp_()).sum(0)
    if group is not None:
        torch.distributed.all_reduce(mass, group=group)
    # NaN counts as mass, so that the loss shows it.
    return total + mass.log(), mass != 0


def _head_scores(q: torch.Tensor, keys: TeacherKeys, heads: slice) -> torch.Tensor:
    """Return ``q . k`` of some heads ``[h, r, w]``, not yet scaled."""
    q = q[:, heads].transpose(0, 1)
    if not isinstance(keys, torch.Tensor):
        return bmm(q, keys.expanded(heads).permute(1, 2, 0))
    if keys.shape[1] == 1:
        # Heads are folded into rows: expanded keys might be copied once per head.
        return mm(q.flatten(0, 1), keys[:, 0].t()).unflatten(0, q.shape[:2])
    return bmm(q, keys[:, heads].permute(1, 2, 0))


def _add_scaled(shift: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``shift + scale * scores`` in place of the scores: they are read and written once."""
    return torch.add(shift, scores, alpha=scale, out=scores)
