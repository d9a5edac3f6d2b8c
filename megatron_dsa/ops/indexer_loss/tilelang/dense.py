"""Dense indexer loss with TileLang teachers for plain MLA (Hopper, bf16)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.hopper.tiles import LOG2_E
from megatron_dsa.ops.indexer_loss.dense import dense_loss
from megatron_dsa.ops.indexer_loss.spec import (
    DenseLossInputs,
    ExpandedKeys,
    IndexerLoss,
    LatentKeys,
    TeacherKeys,
)
from megatron_dsa.ops.indexer_loss.tilelang.teacher import compiled
from megatron_dsa.ops.indexer_loss.triton.dense import BLOCK, TritonTiles, whole_blocks
from megatron_dsa.ops.layout.layout import Seen

ROPE = 64
DIMS = {128: 192, 192: 256}


def dense(inputs: DenseLossInputs) -> IndexerLoss:
    return dense_loss(inputs, HopperTiles(inputs))


class HopperTiles(TritonTiles):
    copies = True

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        nope = _nope_dims(q, keys)
        if nope is None:
            return super().teacher(q, keys, lse, seen)
        q, (heads, queries) = q.contiguous(), lse.shape
        # TMA reads multiples of 16 bytes.
        in_base_2 = lse.new_empty(heads, 1, -(-queries // BLOCK) * BLOCK, dtype=torch.float32)
        torch.mul(lse, LOG2_E, out=in_base_2[:, 0, :queries])
        start, end, out = seen.start.contiguous(), seen.end.contiguous(), None
        for first, k, rope in self._parts(keys):
            if out is None:
                out = whole_blocks(q, queries, len(k), torch.float32)
            compiled(nope, ROPE, k.shape[2] - nope, rope is None)(
                q, k, k.new_empty(1, ROPE) if rope is None else rope, in_base_2, start, end,
                out, first, self._scale,
            )  # fmt: skip
        assert out is not None
        return out

    def _parts(self, keys: TeacherKeys) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield groups of heads: first head, keys ``[w, h, nope + ...]``, shared rope key."""
        if isinstance(keys, torch.Tensor):
            yield 0, keys.contiguous(), None
        elif isinstance(keys, ExpandedKeys):
            yield 0, keys.kv.contiguous(), _shared(keys.k_pe)
        else:
            rank = keys.w_uk.shape[2]
            latents, rope = keys.latents[:, :rank], _shared(keys.latents[:, rank:])
            for some in slices(len(keys.w_uk), self._heads_at_once):
                k = latents @ keys.w_uk[some].flatten(0, 1).t()
                yield some.start, k.unflatten(1, (-1, keys.w_uk.shape[1])), rope


def _shared(rope: torch.Tensor) -> torch.Tensor | None:
    return rope.contiguous() if rope.shape[1] > 0 else None


def _nope_dims(q: torch.Tensor, keys: TeacherKeys) -> int | None:
    if isinstance(keys, torch.Tensor):
        nope = q.shape[2] if keys.shape[1] == q.shape[1] else 0
    else:
        nope = keys.w_uk.shape[1] if isinstance(keys, LatentKeys) else keys.nope.shape[2]
    if nope == q.shape[2]:  # the kernel reads a head's last dims as rope key
        nope -= ROPE
    return nope if DIMS.get(nope) == q.shape[2] else None
