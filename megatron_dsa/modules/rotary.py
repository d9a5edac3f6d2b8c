"""Rotary embeddings by row, and the Hadamard rotation of the indexer.

Megatron's packed (THD) rope asks the device for the sequence lengths on every call. Here the table
is indexed with the layout's positions instead, which is the same for packed and unpacked batches
and needs no synchronisation.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_dsa.parallel.groups import Ranks
from megatron_dsa.sequence.layout import Layout


class RowRope:
    """Rope angles of one microbatch: one row of the table per query row.

    Args:
        embedding: Megatron's ``RotaryEmbedding`` or ``YarnRotaryEmbedding``.
        layout: gives the position of every row.
    """

    def __init__(self, embedding, layout: Layout):
        # Positions are looked up here: the whole table is wanted, also under context parallelism.
        table = embedding(layout.max_length, packed_seq=True)
        # YaRN also returns its concentration factor (mscale), which scales cos and sin.
        table, self.mscale = table if isinstance(table, tuple) else (table, 1.0)
        self.angles = table.flatten(0, 2)[layout.position]  # [rows, dim]

    def own(self, ranks: Ranks) -> RowRope:
        """Return the angles of the rows that this rank holds."""
        part = copy.copy(self)
        (part.angles,) = ranks.own((self.angles,))
        return part

    def __call__(self, x: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
        """Rotate ``x [rows, ..., dim]``; ``interleaved`` pairs neighbouring dims (MLA, GLM)."""
        angles = self.angles.view(-1, *[1] * (x.dim() - 2), self.angles.shape[-1])
        return _apply_rotary_pos_emb_bshd(
            x, angles, mla_rotary_interleaved=interleaved, mscale=self.mscale
        )


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is cached is used in training, too
def _hadamard_signs(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Normalised Walsh-Hadamard transform of the last dim (a power of two).

    As a product with the matrix of signs, which is exact in every dtype: for the indexer's 128
    dims that is a small matrix product, cheaper than log2(128) passes over memory.
    """
    size = x.shape[-1]
    return torch.matmul(x, _hadamard_signs(size, x.dtype, x.device)) * size**-0.5
