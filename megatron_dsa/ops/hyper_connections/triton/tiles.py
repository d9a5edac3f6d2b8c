"""Tiles and programs of the kernels for hyper-connections, without Triton: plans read them."""

from __future__ import annotations

#: Tokens of a program that computes weights, and of its backward.
TOKENS = 64
#: Programs of ``project`` and ``read_backward`` for which a multiprocessor has room.
AT_ONCE = 2
#: Parts of tokens that ``read_backward`` tries, and what a larger number of them must gain.
MOST_PARTS, IDLE = 8, 0.02


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


def mix_backward_stages(channels: int, streams: int, itemsize: int) -> int:
    """Return 2 where the streams and the gradient of the next token fit in shared memory, else 1.

    The smallest shared memory of the GPUs in question has 99 KiB, of which sums take 16.
    """
    return 2 if (streams + 1) * _power_of_2(channels) * itemsize <= 80 * 1024 else 1


def project_tiles(tokens: int, width: int, outputs: int, processors: int) -> tuple[dict, int, int]:
    """Return the constants of ``project``, the parts of columns, and the blocks of each.

    As many programs as run at the same time, two per multiprocessor, each with at least eight
    blocks.
    """
    block_t = max(16, min(128, _power_of_2(tokens)))
    block_k = 64
    blocks = _cdiv(width, block_k)
    wanted = max(1, AT_ONCE * processors // _cdiv(tokens, block_t))
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

    Two programs run on a multiprocessor at the same time. Few parts are taken with which the last
    of them leave few multiprocessors idle.
    """
    block_t, block_c = 64, min(64, max(16, _power_of_2(channels)))
    blocks = _cdiv(tokens, block_t)
    columns, at_once = streams * _cdiv(channels, block_c), AT_ONCE * processors

    def idle(parts: int) -> float:
        programs = columns * parts
        return 1 - programs / (_cdiv(programs, at_once) * at_once)

    few = range(1, min(blocks, max(MOST_PARTS, at_once // columns)) + 1)
    least = min(map(idle, few), default=0.0)
    wanted = next((parts for parts in few if idle(parts) <= least + IDLE), 1)
    steps = _cdiv(blocks, max(1, wanted))
    tile = {
        "BLOCK_T": block_t, "BLOCK_C": block_c, "num_warps": 4, "num_stages": 3,
        "BLOCK_O": max(16, _power_of_2(outputs)),
    }  # fmt: skip
    return tile, _cdiv(blocks, steps), steps
