"""Quantised weights: fp8 or packed fp4, with one scale per block, as the models are released.

How they are stored and dequantised; ``quantising.py`` goes the other way.
"""

import enum
from dataclasses import dataclass

import torch

from megatron_dsa.errors import ConfigError, require

#: Values of the 4-bit codes without a sign (e2m1: sign, two exponent bits, one mantissa bit).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Rows that are dequantised at a time.
_ROWS = 1024


def scale_names(name: str) -> tuple[str, ...]:
    """Return how the scales of weight ``name`` may be called: V3's way, V4's way."""
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


class Format(enum.Enum):
    """How a weight is stored."""

    PLAIN = "floating point numbers, or integers of a table"
    FP8 = "fp8 numbers with a scale for every block"
    FP4 = "two fp4 numbers to a byte, with a scale for every few numbers of a row"


#: Dtypes as safetensors files call them.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Tables of hash routing, by the end of their names.
_TABLE = ".tid2eid"
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}
#: Dtypes of tensors that are read as they are.
AS_STORED = PLAIN | _INTEGERS
_FP8 = ("F8_E4M3", "F8_E5M2")
_PACKED = ("I8", "U8")
_SCALES = (*PLAIN, "F8_E8M0")


@dataclass(frozen=True)
class Quantisation:
    """What config.json says of quantised weights.

    Attributes:
        block: rows and columns that share a scale where weights are fp8; ``None``: none is.
        fp4_experts: weights of experts may be packed fp4.
        dtype: that quantised weights are turned into.
    """

    block: tuple[int, int] | None = None
    fp4_experts: bool = False
    dtype: torch.dtype = torch.bfloat16

    def format(self, name: str, stored: str, scale: str | None) -> Format:
        """Return how the weight ``name`` is stored, by its dtype and the scales beside it."""
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
        """Return rows and columns that share a scale of a quantised weight.

        ``shape`` is that of the weight, if packed after unpacking; ``scales`` and ``stored`` are
        shape and dtype of its scales.
        """
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
    """Return fp4 numbers as fp32, ``[rows, 2 * columns]`` of ``[rows, columns]`` bytes.

    The low four bits are the first number.
    """
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
        weight: ``[rows, columns]`` fp8 or unpacked fp4, any part of the full weight.
        scale: ``[full rows / block, full columns / block]`` rounded up; the *multiplier*, in spite
            of the name that it goes by in checkpoints.
        block: rows and columns of a block; blocks at the edges may be smaller.
        dtype: dtype of the result.
        offset: row and column of the full weight at which this part begins.
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
