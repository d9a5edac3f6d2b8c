"""Masked dense attention and the tiles of its bits, stated as plainly as possible."""

import torch

from megatron_dsa.ops.masked_attention.bits import GROUP, groups, pack, unpack


def masked_attention(
    q: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor, mask: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``out [Sq, H, Dv]``, ``lse [Sq, H]`` and the head sum of the probabilities
    ``[Sq, Skv]``. Differentiable; materialises everything.

    Shapes as in :class:`~megatron_dsa.ops.masked_attention.inputs.MaskedAttentionInputs`; ``mask``
    is bool ``[Sq, Skv]``.
    """
    nope = q.shape[2] - k_pe.shape[1]
    logits = torch.einsum("qhd,khd->qhk", q[..., :nope], kv[..., :nope])
    logits = logits + torch.einsum("qhr,kr->qhk", q[..., nope:], k_pe)
    logits = (logits * softmax_scale).masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    # A query without keys has no softmax; its probabilities are 0, not 0/0.
    p = torch.exp(logits - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("qhk,khd->qhd", p, kv[..., nope:]), lse, p.sum(1)


def visible(
    start: torch.Tensor, end: torch.Tensor, slots: torch.Tensor | None, num_keys: int
) -> torch.Tensor:
    """Return the bool mask ``[Sq, num_keys]`` of the keys whose slots are in a query's range.

    Arguments as in :class:`~megatron_dsa.ops.masked_attention.inputs.VisibleBitsInputs`.
    """
    places = range(num_keys) if slots is None else slots.tolist()
    mask = torch.zeros(len(start), num_keys, dtype=torch.bool, device=start.device)
    for token, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for key, slot in enumerate(places):
            mask[token, key] = first <= slot < last
    return mask


def compact(p_sum: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[Sq, width]``: the entries of ``p_sum [Sq, Skv]`` where ``mask`` holds, then 0."""
    column = torch.where(mask, mask.cumsum(1) - 1, width)
    result = p_sum.new_zeros(len(p_sum), width + 1)
    return result.scatter_(1, column, p_sum.where(mask, 0))[:, :width]


def transpose(bits: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of queries per key, and which tiles are not empty.

    Args:
        bits: int32 ``[Sq, G, 4]`` (:mod:`.bits`).
        num_keys: number of keys.

    Returns:
        int32 ``[128 G, Gq, 4]`` with ``Gq = ceil(Sq / 128)``: word ``l`` of a key and a group of
        queries ``g`` has the queries ``128 g + 8 n + 2 l + e`` at bit ``2 n + e``. uint8
        ``[2 Gq, G]``: whether one of 64 queries selects a key of a group, 1 or 0.
    """
    queries = groups(len(bits)) * GROUP
    mask = bits.new_zeros(queries, groups(num_keys) * GROUP, dtype=torch.bool)
    mask[: len(bits), :num_keys] = unpack(bits, num_keys)
    tiles = mask.unflatten(0, (queries // 64, 64)).unflatten(2, (groups(num_keys), GROUP))
    return pack(mask.t()), tiles.any(3).any(1).to(torch.uint8)


def tile_lists(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 ``[rows, columns]``, per row the columns whose flag is set, ascending, then
    anything (here 0), and int32 ``[rows]``, how many these are.
    """
    ids = torch.zeros(flags.shape, dtype=torch.int32, device=flags.device)
    for row, entries in enumerate(flags):
        columns = entries.nonzero().flatten()
        ids[row, : len(columns)] = columns.int()
    return ids, (flags != 0).sum(1, dtype=torch.int32)
