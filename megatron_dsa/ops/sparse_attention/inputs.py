"""Attention of every query over its own list of key rows (DeepSeek-V3.2, eq. 3; absorbed MLA)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class KeyGradientSum:
    """The gradient of keys, added up over backward calls that have a part of the queries each.

    A backward that adds to global memory anyway goes on where the call before has stopped: it takes
    its accumulator from :meth:`accumulator` and returns ``None`` as ``dkv``. Others return a
    gradient of their own, which the caller hands to :meth:`add`.

    Args:
        rows: rows of queries (tokens times heads) of all calls.
        bounds: returns upper bounds of the magnitudes in ``q`` and in ``dout`` of all calls, fp32
            without dims, for sums in fixed point.
    """

    def __init__(self, rows: int, bounds: Callable[[], tuple[torch.Tensor, torch.Tensor]]):
        self.rows, self.bounds = rows, bounds
        self._accumulator: Any = None
        self._finish: Callable[[Any], torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None

    def accumulator(self, make: Callable[[], Any], finish: Callable[[Any], torch.Tensor]) -> Any:
        """Return what ``make()`` returned in the first call.

        ``finish`` brings it to the gradient ``[Skv, D]``, fp32, after the last call.
        """
        if self._finish is None:
            self._accumulator, self._finish = make(), finish
        return self._accumulator

    def add(self, dkv: torch.Tensor | None) -> None:
        """Add what a backward returned."""
        if dkv is not None:
            self._sum = dkv if self._sum is None else self._sum.add_(dkv)

    def result(self) -> torch.Tensor:
        """Return the sum, after at least one call."""
        if self._finish is not None:
            self.add(self._finish(self._accumulator))
            self._accumulator = None
        assert self._sum is not None
        return self._sum


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
        length_in_range: ``topk_length`` is known to be from 0 to ``K``.
        key_sum: where a backward may add up its gradient of the keys; it then returns ``None``.
        padded_q: ``[Sq, more than H, D]``, contiguous, or ``None``: ``q`` is a view of its first H
            heads, and the others are finite. For a forward that takes so many
            (``Support.head_sizes``) and would copy ``q``.
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
    length_in_range: bool = False
    key_sum: KeyGradientSum | None = None
    padded_q: torch.Tensor | None = None
