"""Attributes that mark stacked matrices and tables for Muon (``extras/muon``)."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.errors import require

#: Parameter attribute with repeating sizes of consecutive blocks along dim 0.
ROW_BLOCKS = "row_blocks"
IS_TABLE = "is_table"


@dataclass(frozen=True)
class LocalBlocks:
    """Local part of a stacked matrix.

    Sizes of its blocks along dim 0, and the number of consecutive ranks that share one block.
    """

    rows: tuple[int, ...]
    sharers: int = 1


def local_blocks(rows: int, pattern: tuple[int, ...], ranks: int) -> LocalBlocks:
    """Return this rank's blocks of a matrix sharded over ``ranks``."""
    require(
        bool(pattern) and all(size >= 1 for size in pattern),
        f"rows of Muon's blocks must be positive, got {pattern}",
    )
    period, total = sum(pattern), rows * ranks
    require(
        total % period == 0,
        f"Muon's blocks of {_words(pattern)} rows must divide the {total} rows of the matrix: "
        f"{total} is no multiple of {period}. Mark it with the rows of one head or group",
    )
    if rows % period == 0:
        return LocalBlocks(pattern * (rows // period))
    require(
        len(pattern) == 1 and period % rows == 0,
        f"tensor-parallel ranks must hold whole blocks of Muon ({_words(pattern)} rows) or equal "
        f"parts of one block, but a rank holds {rows} of {total} rows: choose a "
        "--tensor-model-parallel-size that divides the number of blocks, or is a multiple of it",
    )
    return LocalBlocks((rows,), period // rows)


def _words(pattern: tuple[int, ...]) -> str:
    return " and ".join(map(str, pattern))


def mark_row_blocks(weight: torch.Tensor, pattern: tuple[int, ...], ranks: int) -> None:
    """Mark ``weight``, whole or sharded, as stacked matrices.

    ``pattern``: sizes of consecutive blocks, repeated.
    """
    sharded = is_sharded(weight)
    require(
        weight.dim() == 2 and not (sharded and getattr(weight, "partition_dim", 0) != 0),
        "Muon's blocks are rows of a matrix that is whole or divided by rows, got one of shape "
        f"{tuple(weight.shape)} that is divided along dim {getattr(weight, 'partition_dim', None)}",
    )
    pattern = tuple(pattern)
    local_blocks(weight.shape[0], pattern, ranks if sharded else 1)
    setattr(weight, ROW_BLOCKS, pattern)


def mark_table(parameter: torch.Tensor) -> None:
    setattr(parameter, IS_TABLE, True)


def block_rows(parameter: torch.Tensor) -> tuple[int, ...] | None:
    return getattr(parameter, ROW_BLOCKS, None)


def is_sharded(parameter: Any) -> bool:
    """Return True if tensor-parallel ranks hold parts of a parameter.

    transformer-engine also sets ``partition_dim`` on replicated weights.
    """
    return bool(getattr(parameter, "tensor_model_parallel", False))
