"""Query tokens of a random share in one launch."""

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.launch import launch


@triton.jit(do_not_specialize=["total", "parts"])
def _place_tiles(place, tokens, total, parts, TILE: tl.constexpr):
    """One program per part of the tokens, which gives a tile."""
    part, inside = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    first = (part * total + tl.load(place)) // parts
    tl.store(tokens + part * TILE + inside, (first + inside) % total)


def place_tiles(place: torch.Tensor, total: int, size: int, tile: int) -> torch.Tensor:
    """Return the tokens of :func:`~megatron_dsa.ops.indexer_loss.sample.sampled_tokens`."""
    tokens = place.new_empty(size)
    launch(
        _place_tiles, (size // tile,), place, tokens, total, size // tile, TILE=tile, num_warps=1
    )
    return tokens
