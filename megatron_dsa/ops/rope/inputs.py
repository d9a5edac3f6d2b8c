"""Interleaved rope on the last dims of heads, with or without the query norm before it.

``norm_rope`` divides a head by the root of its mean square (no weight) and rotates pairs of its
last ``R`` dims; ``rotate`` only rotates, in either direction (attention outputs of DeepSeek-V4 are
rotated back, because the value carries rope). Pair ``i`` is dims ``D - R + 2i`` and ``D - R + 2i +
1``; it is turned by the angle whose cosine and sine are ``cos[row, i]`` and ``sin[row, i]``. Both
operations are limited by memory: every element is read once, written once and rounded once.
"""

from __future__ import annotations

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.numerics.checks import FLOATS, require_tensor


def check_inputs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise :class:`ConfigError` unless ``x [rows, H, D]`` and ``cos, sin [rows, R / 2]`` fit."""
    require_tensor("x", x, ("rows", "H", "D"), FLOATS, fix="flatten sequence and batch into rows")
    if x.shape[2] % 2:
        raise ConfigError(f"x must have an even dim, got {x.shape[2]}: pad the heads.")
    fix, dtypes = "gather the rope tables by position", (accumulation_dtype(x.dtype),)
    require_tensor("cos", cos, (x.shape[0], "R / 2"), dtypes, x, fix)
    require_tensor("sin", sin, tuple(cos.shape), dtypes, x, fix)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ConfigError(
            f"cos and sin must have at most dim / 2 = {x.shape[2] // 2} columns, got "
            f"{cos.shape[1]}: one column rotates two dims."
        )
