"""Attention of every query over its own list of key rows (DeepSeek-V3.2, eq. 3; absorbed MLA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SparseAttentionInputs:
    """Inputs of one sparse attention, as every implementation receives them.

    Attributes:
        q: ``[Sq, H, D]``.
        kv: ``[Skv, D]``; the value is its first ``v_dim`` columns.
        indices: int32 ``[Sq, K]``, rows of ``kv``; entries ``< 0`` or ``>= Skv`` select nothing.
        v_dim: columns of ``kv`` that are the value.
        softmax_scale: factor on ``q . kv``.
        topk_length: int32 ``[Sq]`` or ``None``; entries of ``indices`` from there on are ignored.
        sink: fp32 ``[H]`` or ``None``; a logit in the denominator that has no value.
        workspace_bytes: budget for temporary memory.
        want_p_sum: the caller wants the head sum of the probabilities, if it comes for free (in
            the forward or in the backward, whichever asks).
        in_order: all lists are known to follow one order of the keys (see :mod:`.lists`).
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    v_dim: int
    softmax_scale: float
    topk_length: torch.Tensor | None
    sink: torch.Tensor | None
    workspace_bytes: int
    want_p_sum: bool = False
    in_order: bool = False
