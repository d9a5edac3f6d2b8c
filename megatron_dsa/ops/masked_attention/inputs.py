"""What the implementations of masked dense attention receive."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class KeyBitsInputs:
    """Index lists, of which bits are made (:mod:`.bits`).

    Attributes:
        indices: int32 ``[Sq, K]``; entries ``< 0`` or ``>= num_keys`` select nothing.
        topk_length: int32 ``[Sq]`` or ``None``; entries of ``indices`` from there on are ignored.
        num_keys: number of keys, ``Skv``.
        workspace_bytes: budget for temporary memory.
    """

    indices: torch.Tensor
    topk_length: torch.Tensor | None
    num_keys: int
    workspace_bytes: int


class ListedProbabilities(NamedTuple):
    """Head sums of the probabilities of selected keys, and which keys these are.

    Attributes:
        p_sum: ``[Sq, K]`` fp32 (fp64 for fp64 inputs), in ascending order of a query's keys, then
            0.
        indices: int32 ``[n, K]``, the keys of ``n`` of the queries, ascending, then -1.
        length: int32 ``[n]``, how many keys these queries have.
    """

    p_sum: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class VisibleBitsInputs:
    """Ranges of slots, of which bits of visible keys are made (:mod:`.bits`).

    Attributes:
        start, end: int32 ``[Sq]``; query ``i`` sees the slots ``[start[i], end[i])``.
        slots: int32 ``[Skv]``, the slot of each key; ``None``: key ``i`` is slot ``i``.
        num_keys: number of keys, ``Skv``.
        workspace_bytes: budget for temporary memory.
    """

    start: torch.Tensor
    end: torch.Tensor
    slots: torch.Tensor | None
    num_keys: int
    workspace_bytes: int


@dataclass(frozen=True)
class MaskedAttentionInputs:
    """Inputs of one masked dense attention, as every implementation receives them.

    ``Dn`` dims of a query and a key have no rope, ``R`` have it; ``Dn = Dk - v_dim``.

    Attributes:
        q: ``[Sq, H, Dn + R]``, the dims without rope first.
        kv: ``[Skv, H, Dk]``, per head the key without rope, then the value: what MLA's up
            projection returns. Finite, keys that no query selects included.
        k_pe: ``[Skv, R]``, the rope key of all heads; finite.
        bits: int32 ``[Sq, ceil(Skv / 128), 4]``, the keys of each query (:mod:`.bits`).
        v_dim: dims of the value.
        softmax_scale: factor on ``q . k``.
        workspace_bytes: budget for temporary memory.
        kept: what an implementation keeps for the next operation on the same inputs.
    """

    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    bits: torch.Tensor
    v_dim: int
    softmax_scale: float
    workspace_bytes: int
    kept: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def nope_dim(self) -> int:
        """Dims of a key without rope, ``Dn``."""
        return self.kv.shape[2] - self.v_dim

    def of_queries(self, tokens: slice) -> MaskedAttentionInputs:
        """Return the inputs of some queries, without what is kept."""
        return replace(self, q=self.q[tokens], bits=self.bits[tokens], kept={})

    def head_parts(self) -> list[slice]:
        """Return equal parts of the heads, one at least, whose fp32 ``dq`` fits the workspace."""
        queries, heads, dim = self.q.shape
        most = max(1, self.workspace_bytes // (4 * max(1, queries) * dim))
        count = -(-heads // -(-heads // most))
        return [slice(first, min(first + count, heads)) for first in range(0, heads, count)]
