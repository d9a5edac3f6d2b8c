"""Masked dense attention in torch, in bounded memory.

The backward computes scores twice, once for dq and once for dkv, so gradients are rounded once.
"""

from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    bmm,
    items_within,
    slices,
    valid_entries,
)
from megatron_dsa.ops.common.checks import require_values
from megatron_dsa.ops.masked_attention.spec import (
    GROUP,
    WORDS,
    KeyBitsInputs,
    ListedProbabilities,
    MaskedAttentionInputs,
    VisibleBitsInputs,
    groups,
    pack,
    unpack,
)

#: Temporary bytes per query and key.
_BYTES_PACK, _BYTES_UNPACK = 16, 16
MORE_KEYS = "topk must be at least the number of keys of each query, got {}: raise it"


def key_bits(inputs: KeyBitsInputs) -> torch.Tensor:
    queries, width = inputs.indices.shape
    bits = inputs.indices.new_empty(queries, groups(inputs.num_keys), WORDS)
    per_query = bits.shape[1] * GROUP * (1 + _BYTES_PACK) + width * 16
    for tokens in slices(queries, items_within(inputs.workspace_bytes, per_query)):
        indices = inputs.indices[tokens]
        length = None if inputs.topk_length is None else inputs.topk_length[tokens]
        valid = valid_entries(indices, length, inputs.num_keys)
        # Invalid entries go to a spare column.
        mask = valid.new_zeros(len(indices), inputs.num_keys + 1)
        mask.scatter_(1, torch.where(valid, indices, inputs.num_keys).long(), True)
        bits[tokens] = pack(mask[:, :-1])
    return bits


def visible_bits(inputs: VisibleBitsInputs) -> torch.Tensor:
    queries, slots = len(inputs.start), inputs.slots
    if slots is None:
        slots = torch.arange(inputs.num_keys, dtype=torch.int32, device=inputs.start.device)
    bits = inputs.start.new_empty(queries, groups(inputs.num_keys), WORDS)
    per_query = bits.shape[1] * GROUP * (3 + _BYTES_PACK)
    for tokens in slices(queries, items_within(inputs.workspace_bytes, per_query)):
        start, end = inputs.start[tokens, None], inputs.end[tokens, None]
        bits[tokens] = pack((slots >= start) & (slots < end))
    return bits


def forward(inputs: MaskedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    q = inputs.q
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty(*q.shape[:2], inputs.v_dim)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for tokens in _query_blocks(inputs):
        heads_first = out[tokens].transpose(0, 1)
        sums = heads_first.new_zeros(heads_first.shape, dtype=dtype)
        total = sums.new_full(sums.shape[:2], float("-inf"))
        for keys in _key_blocks(inputs):
            key, value = _heads_first(inputs, keys)
            scores = _scores(inputs, tokens, keys, key)
            before, total = total, torch.logaddexp(total, torch.logsumexp(scores, dim=-1))
            shift = _finite(total)
            sums.mul_(torch.exp(before - shift)[..., None])
            probs = scores.sub_(shift[..., None]).exp_()
            sums.add_(bmm(probs.to(q.dtype), value))
        heads_first.copy_(sums)
        lse[tokens] = total.t()
    return out, lse


def probabilities(
    inputs: MaskedAttentionInputs, lse: torch.Tensor, width: int, listed: slice
) -> ListedProbabilities:
    """Return head sums of probabilities, and the selected keys of the queries ``listed``."""
    queries = len(inputs.q)
    p_sum = inputs.q.new_zeros(queries, width, dtype=accumulation_dtype(inputs.q.dtype))
    indices = inputs.bits.new_full((queries, width), -1)
    length = inputs.bits.new_zeros(queries)
    for some, part in inputs.by_part():
        results = p_sum[some], indices[some], length[some]
        for tokens in _query_blocks(part):
            found = _probabilities_of_block(part, lse[some], tokens, width)
            for result, block in zip(results, found, strict=True):
                result[tokens] = block
    require_values({MORE_KEYS.format(width): (length <= width).all()}, MORE_KEYS.format(width))
    return ListedProbabilities(p_sum, indices[listed], length[listed])


def _probabilities_of_block(
    inputs: MaskedAttentionInputs, lse: torch.Tensor, tokens: slice, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Unselected keys go to the last column.
    sums = lse.new_zeros(len(lse[tokens]), width + 1, dtype=accumulation_dtype(inputs.q.dtype))
    listed = inputs.bits.new_full(sums.shape, -1)
    count = torch.zeros_like(sums[:, :1], dtype=torch.int64)
    for keys in _key_blocks(inputs):
        key, _ = _heads_first(inputs, keys)
        probs = _probabilities(inputs, tokens, keys, key, lse).sum(0)
        mask = _mask(inputs, tokens, keys)
        slot = mask.cumsum(1).add_(count)
        count = slot[:, -1:]
        column = torch.where(mask, slot - 1, width).clamp_max_(width)
        sums.scatter_(1, column, probs)
        ids = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=mask.device)
        listed.scatter_(1, column, ids.expand_as(column))
    return sums[:, :width], listed[:, :width], count[:, 0].int()


def backward(
    inputs: MaskedAttentionInputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``dq``, ``dkv`` and, in the accumulation dtype, ``dk_pe``.

    ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P * (dP - rowsum(dO * O))``, ``dQ = dS K``, ``dK = dS^T
    Q``.
    """
    q, nope = inputs.q, inputs.nope_dim
    dtype = accumulation_dtype(q.dtype)
    dq, dkv = torch.empty_like(q), torch.empty_like(inputs.kv)
    dk_pe = torch.empty_like(inputs.k_pe, dtype=dtype)

    def differentiated(tokens: slice, keys: slice, key, value):
        grad = dout[tokens].to(q.dtype).transpose(0, 1)
        delta = (grad.to(dtype) * out[tokens].transpose(0, 1).to(dtype)).sum(-1, keepdim=True)
        probs = _probabilities(inputs, tokens, keys, key, lse)
        dscores = bmm(grad, value.transpose(1, 2)).sub_(delta).mul_(probs)
        return probs.to(q.dtype), dscores.mul_(inputs.softmax_scale).to(q.dtype), grad

    for tokens in _query_blocks(inputs):
        dquery = q[tokens].transpose(0, 1)
        dquery = dquery.new_zeros(dquery.shape, dtype=dtype)
        for keys in _key_blocks(inputs):
            key, value = _heads_first(inputs, keys)
            _, dscores, _ = differentiated(tokens, keys, key, value)
            dquery.add_(bmm(dscores, key))
        dq[tokens] = dquery.transpose(0, 1)
    for keys in _key_blocks(inputs):
        key, value = _heads_first(inputs, keys)
        dkey, dvalue = (x.new_zeros(x.shape, dtype=dtype) for x in (key, value))
        for tokens in _query_blocks(inputs):
            probs, dscores, grad = differentiated(tokens, keys, key, value)
            dkey.add_(bmm(dscores.transpose(1, 2), q[tokens].transpose(0, 1)))
            dvalue.add_(bmm(probs.transpose(1, 2), grad))
        dkv[keys, :, :nope] = dkey[..., :nope].transpose(0, 1)
        dkv[keys, :, nope:] = dvalue.transpose(0, 1)
        torch.sum(dkey[..., nope:], dim=0, out=dk_pe[keys])
    return dq, dkv, dk_pe


def _block_of_keys(inputs: MaskedAttentionInputs) -> int:
    heads, dim = inputs.q.shape[1:]
    sums = accumulation_dtype(inputs.q.dtype).itemsize
    # A key needs its inputs, and in the accumulation dtype a copy, gradients and an addend.
    per_key = heads * (dim + inputs.v_dim) * (inputs.q.element_size() + 3 * sums)
    fitting = items_within(inputs.workspace_bytes // 2, per_key * GROUP)
    return GROUP * max(1, min(fitting, groups(len(inputs.kv))))


def _key_blocks(inputs: MaskedAttentionInputs) -> Iterator[slice]:
    yield from slices(len(inputs.kv), _block_of_keys(inputs))


def _query_blocks(inputs: MaskedAttentionInputs) -> Iterator[slice]:
    heads, dim = inputs.q.shape[1:]
    sums, keys = accumulation_dtype(inputs.q.dtype).itemsize, _block_of_keys(inputs)
    per_query = heads * sums * (4 * keys + 4 * (dim + inputs.v_dim)) + keys * _BYTES_UNPACK
    yield from slices(len(inputs.q), items_within(inputs.workspace_bytes // 2, per_query))


def _heads_first(inputs: MaskedAttentionInputs, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    kv = inputs.kv[keys].transpose(0, 1)
    k_pe = inputs.k_pe[keys].expand(len(kv), -1, -1)
    return torch.cat([kv[..., : inputs.nope_dim], k_pe], dim=-1), kv[..., inputs.nope_dim :]


def _mask(inputs: MaskedAttentionInputs, tokens: slice, keys: slice) -> torch.Tensor:
    first = keys.start // GROUP
    bits = inputs.bits[tokens, first : groups(keys.stop)]
    return unpack(bits, keys.stop - keys.start)


def _scores(inputs: MaskedAttentionInputs, tokens: slice, keys: slice, key) -> torch.Tensor:
    scores = bmm(inputs.q[tokens].transpose(0, 1), key.transpose(1, 2)).mul_(inputs.softmax_scale)
    return scores.masked_fill_(~_mask(inputs, tokens, keys), float("-inf"))


def _probabilities(inputs, tokens: slice, keys: slice, key, lse: torch.Tensor) -> torch.Tensor:
    scores = _scores(inputs, tokens, keys, key)
    return scores.sub_(_finite(lse[tokens]).t()[..., None]).exp_()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)
