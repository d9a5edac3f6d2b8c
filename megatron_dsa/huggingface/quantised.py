"""FP8 weights with one scale per block, as DeepSeek-V3, V3.2 and GLM-5 are released."""

from __future__ import annotations

import torch

from megatron_dsa.errors import ConfigError

#: ``<name>_scale_inv`` holds the scales of weight ``<name>``.
SCALE_SUFFIX = "_scale_inv"


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a tensor holds fp8 numbers, which mean nothing without scales."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def dequantise(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Return ``weight * scale of its block``, multiplied in fp32 and rounded once.

    Args:
        weight: ``[rows, columns]`` fp8, any part of the full weight.
        scale: ``[full rows / block, full columns / block]`` rounded up; the *multiplier*, in spite
            of the name that it goes by in checkpoints.
        block: rows and columns of a block; blocks at the edges may be smaller.
        dtype: of the result.
        offset: row and column of the full weight at which this part begins.

    Raises:
        ConfigError: there are not as many scales as there are blocks.
    """
    for dim in (0, 1):
        end = offset[dim] + weight.shape[dim]
        if end > scale.shape[dim] * block[dim]:
            raise ConfigError(
                f"fp8 weight: {scale.shape[dim]} scales for blocks of {block[dim]} do not cover "
                f"dim {dim} up to {end}: check weight_block_size in the model's config.json"
            )
    columns = torch.arange(offset[1], offset[1] + weight.shape[1], device=scale.device) // block[1]
    columns = scale.float()[:, columns]
    result = weight.float()
    start = 0
    while start < len(result):
        row = (offset[0] + start) // block[0]
        stop = min((row + 1) * block[0] - offset[0], len(result))
        result[start:stop] *= columns[row]
        start = stop
    return result.to(dtype)
