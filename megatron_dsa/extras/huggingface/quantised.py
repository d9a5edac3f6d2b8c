"""Quantised weights: fp8 or packed fp4, one scale per block."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_dsa.errors import ConfigError, require

#: Magnitudes of the 4-bit e2m1 codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Size of the dim-0 slices that are dequantised at a time.
_ROWS = 1024


def scale_names(name: str) -> tuple[str, ...]:
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


class Format(enum.Enum):
    PLAIN = "floating point numbers, or integers of a table"
    FP8 = "fp8 numbers with a scale for every block"
    FP4 = "two fp4 numbers to a byte, with a scale for every few numbers of a row"


#: Dtypes in safetensors' spelling.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Name suffix of hash-routing tables.
_TABLE = ".tid2eid"
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}
#: Dtypes that are read without conversion.
AS_STORED = PLAIN | _INTEGERS
_FP8 = ("F8_E4M3", "F8_E5M2")
_PACKED = ("I8", "U8")
_SCALES = (*PLAIN, "F8_E8M0")


@dataclass(frozen=True)
class Quantisation:
    """Quantisation in config.json: fp8 block size, and dtype after dequantisation."""

    block: tuple[int, int] | None = None
    fp4_experts: bool = False
    dtype: torch.dtype = torch.bfloat16

    def format(self, name: str, stored: str, scale: str | None) -> Format:
        if name.endswith(_TABLE):
            require(
                stored in _INTEGERS and scale is None,
                f"{name} is {stored}, and is a table of experts: it must be "
                f"{' or '.join(_INTEGERS)}, without scales; download the checkpoint again",
            )
            return Format.PLAIN
        if stored in PLAIN:
            require(
                scale is None,
                f"{name} is {stored}, which needs no scales, and {scale} lies beside it: take the "
                "weights as they were released, or remove the scales if they are multiplied in",
            )
            return Format.PLAIN
        if stored in _FP8:
            require(
                self.block is not None and scale is not None,
                f"{name} is fp8 and its scales are not known: config.json must have "
                "quantization_config.weight_block_size and the checkpoint "
                f"{' or '.join(scale_names(name))}",
            )
            return Format.FP8
        if stored in _PACKED and scale is not None:
            require(
                self.fp4_experts and ".experts." in name,
                f"{name} is {stored} with scales: only fp4 numbers of experts are stored so, where "
                'config.json says "expert_dtype": "fp4"',
            )
            return Format.FP4
        raise ConfigError(
            f"{name} is {stored}, which is no dtype of a weight: it must be {', '.join(PLAIN)}, "
            "fp8 with scales, or packed fp4 with scales; convert the checkpoint"
        )

    def scale_block(
        self, name: str, form: Format, shape: tuple[int, ...], scales: tuple[int, ...], stored: str
    ) -> tuple[int, int]:
        """Return the block size of a quantised weight of unpacked ``shape``."""
        require(
            stored in _SCALES and len(shape) == len(scales) == 2 and min(scales) > 0,
            f"{name}: its scales are {stored} of shape {scales}, and must be a matrix of "
            f"{', '.join(_SCALES)}: download the checkpoint again",
        )
        block = self.block if form is Format.FP8 else (1, max(1, shape[1] // scales[1]))
        assert block is not None
        needed = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
        require(
            scales == needed,
            f"{name}: scales of shape {scales} lie beside a weight of {shape}, whose blocks of "
            f"{block} need {needed}: check quantization_config.weight_block_size in config.json",
        )
        return block


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack fp4 ``[m, n / 2]`` to fp32 ``[m, n]``, low bits first."""
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    return torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]


def dequantise(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Return ``weight * scale of its block``, multiplied in fp32 and rounded once.

    Args:
        weight: ``[m, n]`` fp8 or unpacked fp4, any part of the full weight.
        scale: ``[ceil(M / block), ceil(N / block)]`` of the full weight.
        block: size; smaller at the edges.
        dtype: of the result.
        offset: first index of this part in each dim.
    """
    indices = []
    for dim, (start, size, count) in enumerate(zip(offset, block, scale.shape, strict=True)):
        end = start + weight.shape[dim]
        require(
            end <= count * size,
            f"quantised weight: {count} scales for blocks of {size} do not cover dim {dim} up to "
            f"{end}: check weight_block_size in the model's config.json",
        )
        indices.append(torch.arange(start, end) // size)
    rows, columns = indices
    scale = scale.float()[:, columns]
    result = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(weight), _ROWS):
        part = slice(start, start + _ROWS)
        result[part] = weight[part].float() * scale[rows[part]]
    return result


_LARGEST = {Format.FP8: 448.0, Format.FP4: E2M1[-1]}

#: Number of elements quantised at a time.
_ELEMENTS = 1 << 22


class Quantised(NamedTuple):
    """A quantised weight: ``[m, n]`` fp8, or ``[m, n / 2]`` int8 with two fp4 numbers each.

    Low bits come first. ``scales`` is ``[ceil(m / block), ceil(n / block)]`` fp32; ``kept`` counts
    the given scales.
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
    """Quantise a matrix with ``scale = max |w| / largest number``, rounding to nearest even.

    A block keeps a ``given`` scale that reproduces its values to the bit.

    Args:
        weight: ``[m, n]``, finite.
        form: fp8 (e4m3) or fp4 (e2m1).
        block: size; smaller at the edges.
        powers_of_two: round scales up to powers of two.
        given: ``[ceil(m / block), ceil(n / block)]``.
        dtype: of values dequantised with ``given``.
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
    """Return blocks ``[lines, height, count, width]``, zero-padded at the edges."""
    rows, columns = weight.shape
    height, width = block
    below, right = -rows % height, count * width - columns
    padded = torch.nn.functional.pad(weight, (0, right, 0, below))
    return padded.view(-1, height, count, width)


def _scales(blocks: torch.Tensor, form: Format, powers_of_two: bool) -> torch.Tensor:
    tiny = torch.finfo(torch.float32).tiny
    largest = blocks.abs().amax(dim=(1, 3))
    scale = (largest / _LARGEST[form]).clamp(min=tiny)
    if powers_of_two:
        mantissa, exponent = torch.frexp(scale)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(largest == 0, 1.0, scale)


def _dequantised(
    blocks: torch.Tensor, scale: torch.Tensor, form: Format, dtype: torch.dtype
) -> torch.Tensor:
    scale = scale[:, None, :, None]
    numbers = _nearest(blocks / scale, form)
    return (numbers * scale).to(dtype).float()


def _nearest(values: torch.Tensor, form: Format) -> torch.Tensor:
    if form is Format.FP8:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.copysign(torch.tensor(E2M1)[_magnitudes(values)], values)


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(E2M1)
    between = (numbers[1:] + numbers[:-1]) / 2
    sizes = values.abs()
    low, high = (torch.bucketize(sizes, between, right=right) for right in (False, True))
    # Ties round to the even code, which has an even mantissa.
    return torch.where(low == high, low, low + low % 2)


def _encode(values: torch.Tensor, form: Format) -> torch.Tensor:
    if form is Format.FP8:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = (_magnitudes(values) + 8 * values.signbit()).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
