"""Key lists of V4's attention as a registered operation (:mod:`megatron_dsa.ops.key_lists`)."""

from typing import Any

import torch
from torch import Tensor

from megatron_dsa.errors import require
from megatron_dsa.extras.torch_library.registration import (
    check_lengths,
    layout_of,
    policy_of,
    policy_text,
    registered,
)
from megatron_dsa.ops.common.checks import require_tensor, require_values
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys


def key_lists(
    tokens: Tensor,
    window: int,
    *,
    ratio: int = 0,
    selected: Tensor | None = None,
    selected_length: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    policy: Policy = Policy(),
) -> tuple[Tensor, Tensor]:
    """List the keys of every query in DeepSeek-V4's attention, for :func:`sparse_attention`.

    The key buffer holds the ``tokens // ratio`` compressed keys of :func:`compress`, then the
    tokens' keys.

    Args:
        tokens: ``[Sq, ...]``, only its length and device are used.
        window: number of latest positions that a query sees, including itself.
        ratio: positions per compressed key; 0: only the window.
        selected, selected_length: of :func:`indexer_topk` at this ratio; ``None``: all compressed
            keys of the past.
        cu_seqlens, max_seqlen, cu_seqlens_padded, policy: see :func:`indexer_topk`.

    Returns:
        ``indices`` int32 ``[Sq, width]``, -1 padded, and ``length`` int32 ``[Sq]``.
    """
    return _key_lists(
        tokens, selected, selected_length, cu_seqlens, cu_seqlens_padded, window, ratio,
        max_seqlen, policy_text(policy),
    )  # fmt: skip


def _fake_lists(a):
    check_lengths(a.cu_seqlens, a.cu_seqlens_padded, a.max_seqlen)
    _check(a.tokens, a.selected, a.selected_length, a.window, a.ratio)
    count = a.tokens.shape[0]
    longest = count if a.max_seqlen is None else min(a.max_seqlen, count)
    width = min(a.window, longest)
    if a.selected is not None:
        width = a.selected.shape[1] + width
    else:
        # KeyLists needs a width of at least 1.
        width = max(width + (longest // a.ratio if a.ratio else 0), 1)
    return tuple(a.tokens.new_empty(s, dtype=torch.int32) for s in ((count, width), (count,)))


@registered("key_lists", _fake_lists)
def _key_lists(
    tokens: Tensor, selected: Tensor | None, selected_length: Tensor | None,
    cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, window: int, ratio: int = 0,
    max_seqlen: int | None = None, policy: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(tokens, selected, selected_length, window, ratio)
    layout = layout_of(tokens.shape[0], tokens.device, cu_seqlens, cu_seqlens_padded, max_seqlen)
    compressed = compressed_keys(layout, ratio) if ratio else None
    lists = KeyLists(layout, window, compressed, selected, selected_length)
    if selected is not None and selected.numel() > 0:
        # A larger compressed index would address a token's key.
        rule = f"selected must be compressed slots below {lists.offset}, or -1"
        fine = selected.amax() < lists.offset
        require_values({f"{rule}: select with indexer_topk at this ratio": fine}, rule)
    shape = tokens.shape[0], lists.full_width
    indices = torch.full(shape, -1, dtype=torch.int32, device=tokens.device)
    length = torch.empty_like(layout.start)
    for block, part, part_length in lists.blocks(policy_of(policy)):
        indices[block, : part.shape[1]] = part
        length[block] = part_length
    return indices, length


def _check(tokens, selected, selected_length, window: int, ratio: int) -> None:
    require(window >= 0, f"window must not be negative, got {window}: count tokens")
    fix = "pass the ratio of the layer"
    require(ratio == 0 or ratio >= 2, f"ratio must be 0 or at least 2, got {ratio}: {fix}")
    require(
        (selected is None) == (selected_length is None) and (selected is None or ratio > 0),
        "selected needs selected_length and a ratio: pass both results of indexer_topk",
    )
    if selected is not None:
        int32: Any = (torch.int32,)
        fix = "select for the same batch"
        require_tensor("selected", selected, (tokens.shape[0], "topk"), int32, tokens, fix)
        length = (tokens.shape[0],)
        require_tensor("selected_length", selected_length, length, int32, tokens, fix)
