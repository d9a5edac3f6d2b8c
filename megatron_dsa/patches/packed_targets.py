"""Targets of multi-token prediction in packed documents that are padded one by one.

megatron-core 0.19 shifts ids, labels and masks within ``cu_seqlens_q``, the documents' lengths
without padding, though tokens lie at the padded offsets: targets cross documents.
"""

import dataclasses
import functools

import torch

from megatron_dsa.patches import replace


@functools.cache
def shift_within_padded_documents() -> None:
    """Shift within the padded offsets; shifts of unpacked batches see no change."""
    from megatron.core.transformer import multi_token_prediction

    @replace(multi_token_prediction, "_roll_tensor_packed_seq")
    def roll(original, tensor, shifts, dims, packed_seq_params, cp_group=None):
        if shifts != -1 or dims not in (-1, tensor.dim() - 1):
            return original(tensor, shifts, dims, packed_seq_params, cp_group)  # it raises
        ranks = 1 if cp_group is None else cp_group.size()
        lengths = packed_seq_params.cu_seqlens_q.diff()
        offsets = packed_seq_params.cu_seqlens_q_padded
        if offsets is None:
            offsets = packed_seq_params.cu_seqlens_q
        if ranks == 1:
            rolled = tensor.roll(-1, -1)
        else:
            moved = dataclasses.replace(packed_seq_params, cu_seqlens_q=offsets, total_tokens=None)
            rolled, _ = original(tensor, shifts, dims, moved, cp_group)
        rank = 0 if ranks == 1 else cp_group.rank()
        behind = _tokens_behind(tensor.shape[-1], offsets, lengths, ranks, rank)
        rolled = torch.where(behind > 0, rolled, torch.zeros_like(rolled))
        if tensor.dtype == torch.bool:  # a padding mask: padding stays padding
            rolled = torch.where(behind < 0, tensor, rolled)
        return rolled, rolled.sum()


def _tokens_behind(
    count: int, offsets: torch.Tensor, lengths: torch.Tensor, ranks: int, rank: int
) -> torch.Tensor:
    """Return int64 ``[count]``: tokens of the document behind each local one; negative: padding.

    ``offsets [n + 1]``: cumulative padded lengths over all ranks; ``lengths [n]``: real ones.
    Documents lie in zigzag order.
    """
    local = torch.arange(count, device=offsets.device)
    document = torch.bucketize(local * ranks, offsets, right=True) - 1
    document = document.clamp_max(lengths.numel() - 1)  # behind the last one: padding of it
    inside = local - offsets[document] // ranks
    if ranks > 1:
        chunk = offsets.diff()[document] // (2 * ranks)
        second = (2 * ranks - 1 - rank) * chunk + inside - chunk
        inside = torch.where(inside < chunk, rank * chunk + inside, second)
        inside = torch.where(local * ranks < offsets[-1], inside, lengths[document])
    return lengths[document] - 1 - inside
