"""Query tokens of a random share in one launch."""

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.launch import launch


@triton.jit(do_not_specialize=["total", "tiles"])
def _place_tiles(place, tokens, total, tiles, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """One program per tile; its parts of ``NEIGHBOURS`` tokens lie apart."""
    tile, inside = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    first = (tile * total + tl.load(place)) // tiles
    at = inside // NEIGHBOURS * tiles * NEIGHBOURS + tile * NEIGHBOURS + inside % NEIGHBOURS
    tl.store(tokens + at, (first + inside) % total)


def place_tiles(
    place: torch.Tensor, total: int, size: int, tile: int, parts: int = 1
) -> torch.Tensor:
    """Return the tokens of :func:`~megatron_dsa.ops.indexer_loss.sample.sampled_tokens`."""
    tokens = place.new_empty(size)
    launch(
        _place_tiles, (size // tile,), place, tokens, total, size // tile, TILE=tile,
        NEIGHBOURS=tile // parts, num_warps=1,
    )  # fmt: skip
    return tokens
