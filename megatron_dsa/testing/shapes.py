"""The dims of a model's sparse layers and of what is checked of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_dsa.ops.dispatch.support import short_dtype

#: Times are taken with at most so many query tokens: enough to fill a GPU, few enough for seconds.
MAX_TIMED_ROWS = 4096


@dataclass(frozen=True)
class Shape:
    """One model shape.

    Attributes:
        heads, qk_dim, v_dim: of the absorbed attention, per rank.
        index_heads, index_dim: of the indexer.
        topk: keys per query.
        seq: keys.
        rows: query tokens that are compared with float64.
        packed: several sequences share the tokens.
        sink: a learned sink per head.
        dtype: of queries and keys.
    """

    heads: int
    qk_dim: int
    v_dim: int
    index_heads: int
    index_dim: int
    topk: int
    seq: int
    rows: int
    packed: bool = False
    sink: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def timed_rows(self) -> int:
        return min(self.seq, MAX_TIMED_ROWS)

    def attention_label(self) -> str:
        label = f"H{self.heads} D{self.qk_dim}/{self.v_dim} K{self.topk} S{self.seq}"
        label += f" {short_dtype(self.dtype)}"
        return label + (" sink" if self.sink else "") + (" packed" if self.packed else "")

    def indexer_label(self) -> str:
        label = f"HI{self.index_heads} DI{self.index_dim} K{self.topk} S{self.seq}"
        return f"{label} {short_dtype(self.dtype)}" + (" packed" if self.packed else "")

    def on_cpu(self) -> Shape:
        """A shape that the torch implementations and float64 finish on a CPU in a second or two."""
        return dataclasses.replace(
            self,
            heads=min(self.heads, 8),
            index_heads=min(self.index_heads, 8),
            index_dim=min(self.index_dim, 64),
            topk=min(self.topk, 64),
            seq=min(self.seq, 256),
            rows=min(self.rows, 32),
        )
