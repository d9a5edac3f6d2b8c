"""Quantised weights: fp8 or packed fp4, with one scale per block, as the models are released."""

from __future__ import annotations

import torch

from megatron_dsa.errors import ConfigError

#: Of the values that a 4-bit code stands for (e2m1: sign, two exponent bits, one bit of mantissa).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Rows that are dequantised at a time.
_ROWS = 1024


def scale_names(name: str) -> tuple[str, ...]:
    """Return how the scales of weight ``name`` may be called: V3's way, V4's way."""
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a tensor holds fp8 numbers, which mean nothing without scales."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether a weight of this dtype holds two fp4 numbers per byte."""
    return dtype in (torch.int8, torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return fp4 numbers as fp32, ``[rows, 2 * columns]`` of ``[rows, columns]`` bytes.

    The low four bits are the first number.
    """
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)])[codes]


def dequantise(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Return ``weight * scale of its block``, multiplied in fp32 and rounded once.

    Args:
        weight: ``[rows, columns]`` fp8 or unpacked fp4, any part of the full weight.
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
                f"quantised weight: {scale.shape[dim]} scales for blocks of {block[dim]} do not "
                f"cover dim {dim} up to {end}: check weight_block_size in the model's config.json"
            )
    rows, columns = (
        torch.arange(offset[dim], offset[dim] + weight.shape[dim]) // block[dim] for dim in (0, 1)
    )
    scale = scale.float()[:, columns]
    result = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(weight), _ROWS):
        part = slice(start, start + _ROWS)
        result[part] = weight[part].float() * scale[rows[part]]
    return result
