"""Tiles and programs of the kernels for hyper-connections, without Triton: plans read them."""

from __future__ import annotations

#: Tokens of a program that computes weights, and of its backward.
TOKENS = 64


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    """Return the least power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def weight_parts(tokens: int, processors: int) -> int:
    """Programs of the backward of the mix, which run all at the same time."""
    return min(tokens, 2 * processors)


def row_warps(channels: int) -> int:
    """Warps of a program with all channels of all streams of a token: 16 per thread and stream."""
    return max(1, min(16, _power_of_2(channels) // 512))


def project_tiles(tokens: int, width: int, outputs: int, processors: int) -> tuple[dict, int, int]:
    """Return the constants of ``project``, the parts of columns, and the blocks of each.

    About four programs per multiprocessor, each with at least eight blocks.
    """
    block_t = max(16, min(128, _power_of_2(tokens)))
    block_k = 64
    blocks = _cdiv(width, block_k)
    wanted = _cdiv(4 * processors, _cdiv(tokens, block_t))
    steps = max(min(8, blocks), _cdiv(blocks, wanted))
    tile = {
        "BLOCK_T": block_t, "BLOCK_K": block_k, "num_warps": max(1, min(8, block_t // 16)),
        "BLOCK_O": max(16, _power_of_2(outputs)), "num_stages": 4,
    }  # fmt: skip
    return tile, _cdiv(blocks, steps), steps


def read_backward_tiles(
    tokens: int, channels: int, streams: int, outputs: int, processors: int
) -> tuple[dict, int, int]:
    """Return the constants of ``read_backward``, the parts of tokens, and the blocks of each.

    About two programs per multiprocessor, or one part: the fastest of those tried on an H100.
    """
    block_t, block_c = 64, min(64, max(16, _power_of_2(channels)))
    blocks = _cdiv(tokens, block_t)
    wanted = _cdiv(2 * processors, streams * _cdiv(channels, block_c))
    steps = _cdiv(blocks, max(1, min(blocks, wanted)))
    tile = {
        "BLOCK_T": block_t, "BLOCK_C": block_c, "num_warps": 4, "num_stages": 3,
        "BLOCK_O": max(16, _power_of_2(outputs)),
    }  # fmt: skip
    return tile, _cdiv(blocks, steps), steps
