"""Tile sizes and program counts of hyper-connections; memory plans use them without Triton."""

from dataclasses import dataclass

from megatron_dsa.ops.common.arithmetic import ceil_div

TOKENS, WEIGHT_WARPS = 16, 1
#: Columns per program when summing partial gradients of ``fn`` and of the norm's weight.
SUMMED_COLUMNS = 1024, 64


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def weight_parts(tokens: int, processors: int) -> int:
    """Return the number of programs of ``mix_backward``, two per SM."""
    return min(tokens, 2 * processors)


def token_warps(channels: int) -> int:
    """Return the warps of a program so that a thread has 16 channels per stream."""
    return max(1, min(16, _power_of_2(channels) // 512))


def mix_backward_stages(channels: int, streams: int, itemsize: int) -> int:
    """Return 2 stages if shared memory also holds the next token's streams and gradient, else 1."""
    return 2 if (streams + 1) * _power_of_2(channels) * itemsize <= 80 * 1024 else 1


def project_tiles(
    tokens: int, width: int, outputs: int, itemsize: int, processors: int
) -> tuple[dict, int, int]:
    block_t, block_k = max(16, min(64, _power_of_2(tokens))), 256 // itemsize
    blocks = ceil_div(width, block_k)
    wanted = max(1, 2 * processors // ceil_div(tokens, block_t))
    steps = max(min(8, blocks), ceil_div(blocks, wanted))
    tile = {
        "BLOCK_T": block_t, "BLOCK_K": block_k, "num_warps": max(1, min(4, block_t // 16)),
        "BLOCK_O": max(16, _power_of_2(outputs)), "num_stages": 3,
    }  # fmt: skip
    return tile, ceil_div(blocks, steps), steps


@dataclass(frozen=True)
class _Tile:
    """Launch parameters with which ``read_backward`` is fastest on an H100.

    Attributes:
        at_once: concurrent programs per SM.
        idle: acceptable average share of idle program slots.
    """

    tokens: int
    stages: int
    at_once: int
    idle: float


_READ, _HEAD = _Tile(64, 3, 2, 0.05), _Tile(32, 4, 4, 0.16)
#: Maximum number of token parts, each of which writes partial sums.
MOST_PARTS = 8


def read_backward_tiles(
    tokens: int, channels: int, streams: int, outputs: int, processors: int
) -> tuple[dict, int, int]:
    """Return kernel constants, number of parts, and blocks per part."""
    kind = _HEAD if outputs == streams else _READ
    block_c = min(64, max(16, _power_of_2(channels)))
    blocks = ceil_div(tokens, kind.tokens)
    columns, slots = streams * ceil_div(channels, block_c), kind.at_once * processors

    def idle(parts: int) -> float:
        programs = columns * parts
        return 1 - programs / (ceil_div(programs, slots) * slots)

    some = range(1, min(blocks, max(MOST_PARTS, slots // columns)) + 1)
    parts = next((n for n in some if idle(n) <= kind.idle), min(some, key=idle, default=1))
    steps = ceil_div(blocks, parts)
    tile = {
        "BLOCK_T": kind.tokens, "BLOCK_C": block_c, "num_warps": 4, "num_stages": kind.stages,
        "BLOCK_O": max(16, _power_of_2(outputs)),
    }  # fmt: skip
    return tile, ceil_div(blocks, max(1, steps)), steps
