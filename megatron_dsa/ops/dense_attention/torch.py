"""Attention to one block in torch: any device and dtype, a block of query tokens at a time."""

from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, bmm, rows_in_budget
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES


def forward(
    q, k, v, causal, scale, sequences: Dense | Packed, workspace_bytes=DEFAULT_WORKSPACE_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out [Sq, H, Dv]`` and ``lse [Sq, H]`` in the accumulation dtype."""
    acc = accumulation_dtype(q.dtype)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=acc)
    lse = q.new_empty(q.shape[:2], dtype=acc)
    for rows, keys, hidden in _tiles(q, k, causal, sequences, 3, workspace_bytes):
        scores = _scores(q[rows], k[keys], hidden, scale)
        tile_lse = torch.logsumexp(scores, dim=-1)
        probs = scores.sub_(_finite(tile_lse)[..., None]).exp_().to(q.dtype)
        out[rows] = bmm(probs, v[keys].transpose(0, 1)).transpose(0, 1)
        lse[rows] = tile_lse.transpose(0, 1)
    return out, lse


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    causal,
    scale,
    sequences: Dense | Packed,
    workspace_bytes=DEFAULT_WORKSPACE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``dq``, ``dk`` and ``dv`` in the accumulation dtype."""
    acc = accumulation_dtype(q.dtype)
    dq = torch.empty_like(q, dtype=acc)
    dk, dv = torch.zeros_like(k, dtype=acc), torch.zeros_like(v, dtype=acc)
    for rows, keys, hidden in _tiles(q, k, causal, sequences, 5, workspace_bytes):
        tile_q, tile_k = q[rows].transpose(0, 1), k[keys].transpose(0, 1)
        tile_dout = dout[rows].to(q.dtype).transpose(0, 1)
        delta = (tile_dout.to(acc) * out[rows].to(acc).transpose(0, 1)).sum(-1)
        probs = _scores(q[rows], k[keys], hidden, scale)
        probs = probs.sub_(_finite(lse[rows]).transpose(0, 1)[..., None]).exp_()
        dscores = bmm(tile_dout, v[keys].permute(1, 2, 0))
        dscores = dscores.sub_(delta[..., None]).mul_(probs).mul_(scale).to(q.dtype)
        dq[rows] = bmm(dscores, tile_k).transpose(0, 1)
        dk[keys] += bmm(dscores.transpose(1, 2), tile_q).transpose(0, 1)
        dv[keys] += bmm(probs.to(q.dtype).transpose(1, 2), tile_dout).transpose(0, 1)
    return dq, dk, dv


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """The lse with 0 where a row has no keys: its scores are all ``-inf``."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def _scores(q, k, hidden, scale) -> torch.Tensor:
    """Scaled logits ``[H, rows, keys]``, ``-inf`` at what a query does not see."""
    scores = bmm(q.transpose(0, 1), k.permute(1, 2, 0)).mul_(scale)
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _tiles(q, k, causal, sequences, copies, workspace_bytes) -> Iterator[tuple]:
    """Cut the work into ``(query tokens, key rows, what is hidden or None)`` within the budget."""
    bytes_per_key = copies * q.shape[1] * accumulation_dtype(q.dtype).itemsize

    def fitting(keys: int) -> int:
        return rows_in_budget(workspace_bytes, bytes_per_key * keys)

    if isinstance(sequences, Packed):
        yield from _packed_tiles(q, k, causal, sequences, fitting)
    else:
        yield from _dense_tiles(q, k, causal, sequences.batch, fitting)


def _dense_tiles(q, k, causal, batch, fitting):
    queries, keys = q.shape[0] // batch, k.shape[0] // batch
    step = fitting(keys)
    for element in range(batch):
        for first in range(0, queries, step):
            last = min(first + step, queries)
            seen = last if causal else keys
            hidden = None
            if causal:
                places = torch.arange(seen, device=q.device)
                hidden = places > places[first:last, None]
            yield (
                slice(first * batch + element, (last - 1) * batch + element + 1, batch),
                slice(element, (seen - 1) * batch + element + 1, batch),
                hidden,
            )


def _packed_tiles(q, k, causal, sequences, fitting):
    queries, keys, reach = q.shape[0], k.shape[0], sequences.reach or sequences.longest
    start, end, place = sequences.ranges(queries)
    if causal:
        end = torch.minimum(end, start + place + 1)
    step = fitting(min(keys, 3 * reach))
    step = min(step, reach)
    for first in range(0, queries, step):
        last = min(first + step, queries)
        lo, hi = max(0, first - reach), min(keys, last + (0 if causal else reach))
        slots = torch.arange(lo, hi, device=q.device)
        rows = slice(first, last)
        yield rows, slice(lo, hi), (slots < start[rows, None]) | (slots >= end[rows, None])
