"""Sparse attention in torch, in bounded memory."""

import math

import torch

from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    bmm,
    items_within,
    valid_entries,
)
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs


def _chunks(inputs: SparseAttentionInputs, copies_of_keys: int, copies_of_scores: int):
    heads, width = inputs.q.shape[1], inputs.indices.shape[1]
    acc = accumulation_dtype(inputs.q.dtype).itemsize
    per_key = copies_of_keys * inputs.kv.shape[1] * acc + copies_of_scores * heads * acc + 16
    tokens = items_within(inputs.workspace_bytes, width * per_key)
    for first in range(0, inputs.q.shape[0], tokens):
        yield slice(first, first + tokens)


def _with_zero_key(kv: torch.Tensor) -> torch.Tensor:
    return torch.cat([kv, kv.new_zeros(1, kv.shape[1])])


def _selected(inputs: SparseAttentionInputs, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    index = inputs.indices[tokens]
    length = None if inputs.topk_length is None else inputs.topk_length[tokens]
    valid = valid_entries(index, length, inputs.kv.shape[0])
    return torch.where(valid, index, inputs.kv.shape[0]).long(), valid


def _scores(inputs: SparseAttentionInputs, tokens: slice, keys: torch.Tensor, valid: torch.Tensor):
    scores = bmm(inputs.q[tokens], keys.transpose(1, 2)).mul_(inputs.softmax_scale)
    return scores.masked_fill_(~valid[:, None], float("-inf"))


def forward(
    inputs: SparseAttentionInputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q, v_dim = inputs.q, inputs.v_dim
    acc = accumulation_dtype(q.dtype)
    out = q.new_empty(q.shape[0], q.shape[1], v_dim)
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=acc)
    p_sum = q.new_empty(inputs.indices.shape, dtype=acc) if inputs.want_p_sum else None
    table = _with_zero_key(inputs.kv)
    for tokens in _chunks(inputs, copies_of_keys=2, copies_of_scores=3):
        index, valid = _selected(inputs, tokens)
        keys = table[index]
        scores = _scores(inputs, tokens, keys, valid)
        chunk_lse = torch.logsumexp(scores, dim=-1)
        probs = scores.sub_(denominator(inputs, chunk_lse)[..., None]).exp_()
        out[tokens] = bmm(probs.to(q.dtype), keys[..., :v_dim])
        lse[tokens] = chunk_lse
        if p_sum is not None:
            torch.sum(probs, dim=1, out=p_sum[tokens])
    return out, lse, p_sum


def probabilities(inputs: SparseAttentionInputs, lse: torch.Tensor) -> torch.Tensor:
    p_sum = inputs.q.new_empty(inputs.indices.shape, dtype=accumulation_dtype(inputs.q.dtype))
    table = _with_zero_key(inputs.kv)
    for tokens in _chunks(inputs, copies_of_keys=2, copies_of_scores=3):
        index, valid = _selected(inputs, tokens)
        scores = _scores(inputs, tokens, table[index], valid)
        probs = scores.sub_(denominator(inputs, lse[tokens])[..., None]).exp_()
        torch.sum(probs, dim=1, out=p_sum[tokens])
    return p_sum


def denominator(inputs: SparseAttentionInputs, lse: torch.Tensor) -> torch.Tensor:
    """Return the log of the softmax denominator, replacing ``-inf`` by 0."""
    if inputs.sink is not None:
        lse = torch.logaddexp(lse, inputs.sink.to(lse.dtype).expand_as(lse))
    return replace_negative_infinity(lse, 0.0)


def replace_negative_infinity(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.nan_to_num(x, nan=math.nan, posinf=math.inf, neginf=value)


def backward(
    inputs: SparseAttentionInputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ``dq``, ``dkv`` (accumulation dtype), ``dsink`` and ``p_sum``."""
    q, kv, v_dim, scale = inputs.q, inputs.kv, inputs.v_dim, inputs.softmax_scale
    acc = accumulation_dtype(q.dtype)
    dq = torch.empty_like(q)
    table = _with_zero_key(kv)
    # The spare last entry collects key gradients of invalid indices.
    dkv = kv.new_zeros(table.shape, dtype=acc)
    dsink = None if inputs.sink is None else q.new_zeros(q.shape[1], dtype=acc)
    p_sum = q.new_empty(inputs.indices.shape, dtype=acc) if inputs.want_p_sum else None
    for tokens in _chunks(inputs, copies_of_keys=4, copies_of_scores=4):
        index, valid = _selected(inputs, tokens)
        keys = table[index]
        chunk_dout = dout[tokens].to(q.dtype)
        delta = (chunk_dout.to(acc) * out[tokens].to(acc)).sum(-1)
        total = denominator(inputs, lse[tokens])
        probs = _scores(inputs, tokens, keys, valid).sub_(total[..., None]).exp_()
        if p_sum is not None:
            torch.sum(probs, dim=1, out=p_sum[tokens])
        dscores = bmm(chunk_dout, keys[..., :v_dim].transpose(1, 2))
        dscores.sub_(delta[..., None]).mul_(probs)
        dscores = dscores.mul_(scale).to(q.dtype)
        dq[tokens] = bmm(dscores, keys)
        dkeys = bmm(dscores.transpose(1, 2), q[tokens])
        dkeys[..., :v_dim] += bmm(probs.to(q.dtype).transpose(1, 2), chunk_dout)
        dkv.index_add_(0, index.flatten(), dkeys.flatten(0, 1))
        if dsink is not None:
            assert inputs.sink is not None
            dsink -= (torch.exp(inputs.sink.to(acc) - total) * delta).sum(0)
    return dq, dkv[:-1], dsink, p_sum
