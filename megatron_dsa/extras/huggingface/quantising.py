"""Quantising weights: fp8 or packed fp4 with one scale per block.

The largest number of a block decides its scale, ``max |w| / largest number of the format``, on
request rounded up to a power of two. A number is the nearest of the format to ``w / scale``, of two
equally near ones that with an even mantissa.
"""

from typing import NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.extras.huggingface.quantised import E2M1, Format

_LARGEST = {Format.FP8: 448.0, Format.FP4: E2M1[-1]}

#: Elements that are quantised at a time, at least one row of blocks.
_ELEMENTS = 1 << 22


class Quantised(NamedTuple):
    """A quantised weight.

    Attributes:
        weight: ``[rows, columns]`` fp8, or ``[rows, columns / 2]`` int8 with two fp4 numbers each,
            the first in the low bits.
        scales: ``[rows / block, columns / block]`` rounded up, fp32.
        kept: blocks that have a scale of ``given``.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    kept: int


def quantise(
    weight: torch.Tensor,
    form: Format,
    block: tuple[int, int],
    *,
    powers_of_two: bool,
    given: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Quantised:
    """Quantise a matrix.

    A block keeps the scale that it is ``given`` if its values are multiples of that, to the bit:
    then they came from numbers of the format with that scale, and become these numbers again.

    Args:
        weight: ``[rows, columns]``, finite.
        form: fp8 (e4m3) or fp4 (e2m1).
        block: rows and columns that share a scale; blocks at the edges may be smaller.
        powers_of_two: scales are rounded up to powers of two.
        given: ``[rows / block, columns / block]`` rounded up: scales to keep, where they fit.
        dtype: in which the values of ``given`` were rounded when they were dequantised.

    Raises:
        ConfigError: fp4 numbers do not fill bytes.
    """
    rows, columns = weight.shape
    height, width = block
    packed = form is Format.FP4
    require(
        not packed or columns % 2 == 0,
        f"fp4 weights of {columns} columns do not fill bytes: export without --quantise, or give a "
        'config.json with "expert_dtype": "fp8"',
    )
    shape = -(-rows // height), -(-columns // width)
    out = torch.empty(
        (rows, columns // 2) if packed else (rows, columns),
        dtype=torch.int8 if packed else torch.float8_e4m3fn,
    )
    scales, kept = torch.empty(shape), 0
    step = max(1, _ELEMENTS // (height * columns)) if columns else 1
    for first in range(0, shape[0], step):
        lines = slice(first, min(first + step, shape[0]))
        part = slice(lines.start * height, min(lines.stop * height, rows))
        blocks = _in_blocks(weight[part].float(), block, shape[1])
        scale = _scales(blocks, form, powers_of_two)
        if given is not None:
            old = given[lines].float()
            fits = _dequantised(blocks, old, form, dtype).eq(blocks).all(3).all(1)
            scale = torch.where(fits, old, scale)
            kept += int(fits.sum())
        scales[lines] = scale
        numbers = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        out[part] = _encode(numbers[: part.stop - part.start, :columns], form)
    return Quantised(out, scales, kept)


def _in_blocks(weight: torch.Tensor, block: tuple[int, int], count: int) -> torch.Tensor:
    """Return ``[lines, height, count, width]`` of a matrix, with zeros behind its edges."""
    rows, columns = weight.shape
    height, width = block
    below, right = -rows % height, count * width - columns
    padded = torch.nn.functional.pad(weight, (0, right, 0, below))
    return padded.view(-1, height, count, width)


def _scales(blocks: torch.Tensor, form: Format, powers_of_two: bool) -> torch.Tensor:
    """Return the scales of blocks by their largest numbers; 1 for zeros."""
    tiny = torch.finfo(torch.float32).tiny
    largest = blocks.abs().amax(dim=(1, 3))
    scale = (largest / _LARGEST[form]).clamp(min=tiny)
    if powers_of_two:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [1/2, 1)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(largest == 0, 1.0, scale)


def _dequantised(
    blocks: torch.Tensor, scale: torch.Tensor, form: Format, dtype: torch.dtype
) -> torch.Tensor:
    """Return what blocks become once they are quantised with ``scale`` and dequantised."""
    scale = scale[:, None, :, None]
    numbers = _nearest(blocks / scale, form)
    return (numbers * scale).to(dtype).float()


def _nearest(values: torch.Tensor, form: Format) -> torch.Tensor:
    if form is Format.FP8:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.copysign(torch.tensor(E2M1)[_magnitudes(values)], values)


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of the fp4 numbers nearest to ``|values|``."""
    numbers = torch.tensor(E2M1)
    between = (numbers[1:] + numbers[:-1]) / 2
    sizes = values.abs()
    low, high = (torch.bucketize(sizes, between, right=right) for right in (False, True))
    # In the middle of two codes, one apart, the even one has the even mantissa.
    return torch.where(low == high, low, low + low % 2)


def _encode(values: torch.Tensor, form: Format) -> torch.Tensor:
    if form is Format.FP8:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = (_magnitudes(values) + 8 * values.signbit()).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
