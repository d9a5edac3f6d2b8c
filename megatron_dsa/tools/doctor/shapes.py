"""The shapes that are checked: one object per shape, and the grid that the user asked for."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from itertools import product

import torch

from megatron_dsa.dispatch.support import short_dtype
from megatron_dsa.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Fewer would leave no room for the rows and keys that are made difficult on purpose.
MINIMUM = {"seq": 64, "rows": 16}
#: Times are taken with at most so many query rows: enough to fill a GPU, few enough for seconds.
MAX_TIMED_ROWS = 4096


@dataclass(frozen=True)
class Shape:
    """One model shape.

    Attributes:
        heads, qk_dim, v_dim: of the absorbed attention, per rank.
        index_heads, index_dim: of the indexer.
        topk: keys per query.
        seq: keys.
        rows: query rows that are compared with float64.
        packed: several sequences share the rows.
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
    packed: bool
    sink: bool
    dtype: torch.dtype

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


_SWITCH = {"off": (False,), "on": (True,), "both": (False, True)}


def shapes_from(arguments: argparse.Namespace) -> list[Shape]:
    """Return the grid of shapes that the arguments ask for.

    Raises:
        ConfigError: for a sequence or a number of rows that is too short to check anything.
    """
    for name, minimum in MINIMUM.items():
        if getattr(arguments, name) < minimum:
            raise ConfigError(
                f"--{name} must be at least {minimum}, got {getattr(arguments, name)}: some rows "
                "and keys are made invalid on purpose, and the others must carry the check."
            )
    qk_dim, v_dim = arguments.dims
    return [
        Shape(
            heads=heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            index_heads=arguments.index_heads,
            index_dim=arguments.index_dim,
            topk=topk,
            seq=arguments.seq,
            rows=min(arguments.rows, arguments.seq),
            packed=packed,
            sink=sink,
            dtype=_DTYPES[arguments.dtype],
        )
        for heads, topk, packed, sink in product(
            arguments.heads, arguments.topk, _SWITCH[arguments.packed], _SWITCH[arguments.sink]
        )
    ]
