"""Triton kernels that compute sampled tokens and scatter their gradients to all tokens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div
from megatron_dsa.ops.common.launch import launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["total", "tiles"])
def _tile_tokens(offset, tokens, total, tiles, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    tile, inside = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    first = (tile * total + tl.load(offset)) // tiles
    at = (inside // NEIGHBOURS * tiles + tile) * NEIGHBOURS + inside % NEIGHBOURS
    tl.store(tokens + at, (first + inside) % total)


def tile_tokens(
    offset: torch.Tensor, total: int, size: int, tile: int, parts: int = 1
) -> torch.Tensor:
    tokens = offset.new_empty(size)
    launch(
        _tile_tokens, (size // tile,), offset, tokens, total, size // tile, TILE=tile,
        NEIGHBOURS=tile // parts, num_warps=1,
    )  # fmt: skip
    return tokens


@triton.jit
def _spread_block(x, out, source, target, size, block, BLOCK: tl.constexpr):
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + source * size + column, mask=inside & (source >= 0), other=0)
    tl.store(out + target * size + column, values, mask=inside)


@triton.jit(
    do_not_specialize=["size", "size_b", "total", "tiles"],
    do_not_specialize_on_alignment=["x", "x_b"],
)
def _spread(
    tokens, x, out, size, x_b, out_b, size_b, total, tiles, TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(0).to(tl.int64)
    # A sampled tile may begin one token before its stretch or end in the next stretch.
    stretch = (target * tiles + tiles - 1) // total
    source = target * 0 - 1
    for back in tl.static_range(2):
        tile = (stretch + tiles - back) % tiles
        inside = (target + total - tl.load(tokens + tile * NEIGHBOURS)) % total
        at = (inside // NEIGHBOURS * tiles + tile) * NEIGHBOURS + inside % NEIGHBOURS
        source = tl.where(inside < TILE, at, source)
    block, blocks = tl.program_id(1), tl.cdiv(size, BLOCK)
    if block < blocks:
        _spread_block(x, out, source, target, size, block, BLOCK)
    elif x_b is not None:
        _spread_block(x_b, out_b, source, target, size_b, block - blocks, BLOCK)


def spread(
    tokens: torch.Tensor, total: int, tile: int, parts: int, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    count = tokens.shape[0]
    results = [x.new_empty(total, *x.shape[1:]) for x in tensors]
    sizes = [x.numel() // count for x in tensors]
    arguments: list = [x for part in zip(tensors, results, sizes, strict=True) for x in part]
    arguments += [None, None, 0] * (2 - len(tensors))
    blocks = sum(ceil_div(size, _BLOCK) for size in sizes)
    launch(
        _spread, (total, blocks), tokens, *arguments, total, count // tile, TILE=tile,
        NEIGHBOURS=tile // parts, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return results
