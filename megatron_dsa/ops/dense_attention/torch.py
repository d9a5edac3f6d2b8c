"""Attention to one block in torch."""

from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, bmm, items_within
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES


def forward(
    q, k, v, causal, scale, sequences: Dense | Packed, workspace_bytes=DEFAULT_WORKSPACE_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulation_dtype(q.dtype)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=acc)
    lse = q.new_empty(q.shape[:2], dtype=acc)
    for queries, keys, hidden in _tiles(q, k, causal, sequences, 3, workspace_bytes):
        scores = _scores(q[queries], k[keys], hidden, scale)
        tile_lse = torch.logsumexp(scores, dim=-1)
        probs = scores.sub_(_finite(tile_lse)[..., None]).exp_().to(q.dtype)
        out[queries] = bmm(probs, v[keys].transpose(0, 1)).transpose(0, 1)
        lse[queries] = tile_lse.transpose(0, 1)
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
    acc = accumulation_dtype(q.dtype)
    dq = torch.empty_like(q, dtype=acc)
    dk, dv = torch.zeros_like(k, dtype=acc), torch.zeros_like(v, dtype=acc)
    for queries, keys, hidden in _tiles(q, k, causal, sequences, 5, workspace_bytes):
        tile_q, tile_k = q[queries].transpose(0, 1), k[keys].transpose(0, 1)
        tile_dout = dout[queries].to(q.dtype).transpose(0, 1)
        delta = (tile_dout.to(acc) * out[queries].to(acc).transpose(0, 1)).sum(-1)
        probs = _scores(q[queries], k[keys], hidden, scale)
        probs = probs.sub_(_finite(lse[queries]).transpose(0, 1)[..., None]).exp_()
        dscores = bmm(tile_dout, v[keys].permute(1, 2, 0))
        dscores = dscores.sub_(delta[..., None]).mul_(probs).mul_(scale).to(q.dtype)
        dq[queries] = bmm(dscores, tile_k).transpose(0, 1)
        dk[keys] += bmm(dscores.transpose(1, 2), tile_q).transpose(0, 1)
        dv[keys] += bmm(probs.to(q.dtype).transpose(1, 2), tile_dout).transpose(0, 1)
    return dq, dk, dv


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)


def _scores(q, k, hidden, scale) -> torch.Tensor:
    scores = bmm(q.transpose(0, 1), k.permute(1, 2, 0)).mul_(scale)
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _tiles(q, k, causal, sequences, copies, workspace_bytes) -> Iterator[tuple]:
    bytes_per_key = copies * q.shape[1] * accumulation_dtype(q.dtype).itemsize

    def fitting(keys: int) -> int:
        return items_within(workspace_bytes, bytes_per_key * keys)

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
                positions = torch.arange(seen, device=q.device)
                hidden = positions > positions[first:last, None]
            yield (
                slice(first * batch + element, (last - 1) * batch + element + 1, batch),
                slice(element, (seen - 1) * batch + element + 1, batch),
                hidden,
            )


def _packed_tiles(q, k, causal, sequences, fitting):
    queries, keys, reach = q.shape[0], k.shape[0], sequences.reach or sequences.longest
    start, end, position = sequences.ranges(queries)
    if causal:
        end = torch.minimum(end, start + position + 1)
    step = fitting(min(keys, 3 * reach))
    step = min(step, reach)
    for first in range(0, queries, step):
        last = min(first + step, queries)
        lo, hi = max(0, first - reach), min(keys, last + (0 if causal else reach))
        tokens = torch.arange(lo, hi, device=q.device)
        part = slice(first, last)
        yield part, slice(lo, hi), (tokens < start[part, None]) | (tokens >= end[part, None])
