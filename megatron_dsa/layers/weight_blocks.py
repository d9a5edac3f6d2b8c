"""Marks on parameters that say what Muon does with them.

The module that makes a parameter marks it, because it alone knows what the rows mean. A mark holds
for the whole matrix: it names rows, not how many blocks a rank has, and therefore is the same on
every tensor-parallel rank.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.errors import require

#: Attribute with the rows of consecutive blocks, a pattern that repeats down the whole matrix.
BLOCK_ROWS = "muon_block_rows"
#: Attribute of matrices that are no linear maps.
TO_ADAMW = "muon_leaves_to_adamw"


@dataclass(frozen=True)
class LocalBlocks:
    """What a rank holds of a matrix in blocks.

    Attributes:
        rows: of the blocks that it holds, or of its part of one.
        sharers: consecutive ranks that hold one block between them; 1 if its blocks are whole.
    """

    rows: tuple[int, ...]
    sharers: int = 1


def local_blocks(rows: int, pattern: tuple[int, ...], ranks: int) -> LocalBlocks:
    """Return which blocks a rank holds.

    Args:
        rows: of the matrix on this rank.
        pattern: rows of consecutive blocks; it repeats.
        ranks: tensor-parallel ranks that the rows are divided among; 1 if they are not.

    Raises:
        ConfigError: the pattern does not divide the matrix, or ranks divide it in other places.
    """
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


def split_for_muon(weight: torch.Tensor, pattern: tuple[int, ...], ranks: int) -> None:
    """Let Muon orthogonalise blocks of rows of a weight on their own.

    Args:
        weight: ``[rows, columns]``, or this rank's rows of it.
        pattern: rows of consecutive blocks; it repeats down the whole matrix.
        ranks: tensor-parallel size of the model.

    Raises:
        ConfigError: the pattern does not fit the weight, or ranks divide its columns.
    """
    sharded = is_sharded(weight)
    require(
        weight.dim() == 2 and not (sharded and getattr(weight, "partition_dim", 0) != 0),
        "Muon's blocks are rows of a matrix that is whole or divided by rows, got one of shape "
        f"{tuple(weight.shape)} that is divided along dim {getattr(weight, 'partition_dim', None)}",
    )
    pattern = tuple(pattern)
    local_blocks(weight.shape[0], pattern, ranks if sharded else 1)
    setattr(weight, BLOCK_ROWS, pattern)


def leave_to_adamw(parameter: torch.Tensor) -> None:
    """Let AdamW update a matrix that is no linear map, such as a table."""
    setattr(parameter, TO_ADAMW, True)


def block_rows(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return the rows of a parameter's blocks, ``None`` if it is one matrix."""
    return getattr(parameter, BLOCK_ROWS, None)


def is_sharded(parameter: Any) -> bool:
    """Whether tensor-parallel ranks hold parts of it.

    transformer-engine sets ``partition_dim`` on weights that every rank holds in full, too.
    """
    return bool(getattr(parameter, "tensor_model_parallel", False))


def is_left_to_adamw(parameter: torch.Tensor) -> bool:
    """Whether AdamW updates a parameter when ``--optimizer muon`` is given.

    DeepSeek-V4's rule: AdamW for embedding and output head, norms, and the base and scale vectors
    of hyper-connections; Muon for all other matrices. Vectors and embeddings are told by shape and
    Megatron's own mark, tables by ours.
    """
    embeds = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() != 2 or bool(embeds) or getattr(parameter, TO_ADAMW, False)


def full_shape(parameter: Any, ranks: int) -> tuple[int, ...]:
    """Return the shape of a parameter that ``ranks`` tensor-parallel ranks hold together."""
    shape = list(parameter.shape)
    if is_sharded(parameter):
        shape[parameter.partition_dim] *= ranks
    return tuple(shape)


def number_of_blocks(parameter: Any, ranks: int) -> int:
    """Return how many matrices Muon orthogonalises in a parameter.

    Args:
        parameter: this rank's part of it.
        ranks: tensor-parallel size of the model.
    """
    pattern = block_rows(parameter)
    if pattern is None:
        return 1
    return len(pattern) * (full_shape(parameter, ranks)[0] // sum(pattern))
