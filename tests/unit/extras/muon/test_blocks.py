"""Marks of parameters: a rank's blocks, and rejected marks."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.muon.optimizer import is_left_to_adamw
from megatron_dsa.extras.muon.table import number_of_blocks
from megatron_dsa.layers.weight_blocks import (
    LocalBlocks,
    block_rows,
    local_blocks,
    mark_row_blocks,
    mark_table,
)


def weight(rows, columns=6, partition_dim=None):
    parameter = torch.nn.Parameter(torch.zeros(rows, columns))
    parameter.tensor_model_parallel = partition_dim is not None
    # transformer-engine also marks replicated weights like this.
    parameter.partition_dim = partition_dim or 0
    return parameter


@pytest.mark.parametrize(
    ("rows", "pattern", "ranks", "held"),
    [
        (32, (4,), 1, LocalBlocks((4,) * 8)),
        (16, (4,), 2, LocalBlocks((4,) * 4)),
        (4, (4,), 8, LocalBlocks((4,))),  # exactly one block, not a part of the matrix
        (2, (4,), 16, LocalBlocks((2,), 2)),
        (1, (4,), 4, LocalBlocks((1,), 4)),
        (14, (3, 4), 2, LocalBlocks((3, 4, 3, 4))),
        (7, (3, 4), 4, LocalBlocks((3, 4))),
    ],
)
def test_blocks_of_a_rank(rows, pattern, ranks, held):
    assert local_blocks(rows, pattern, ranks) == held


@pytest.mark.parametrize(
    ("rows", "pattern", "ranks", "message"),
    [
        (30, (4,), 1, "must divide the 30 rows"),
        (6, (4,), 3, "must divide the 18 rows"),
        (6, (4,), 2, "a rank holds 6 of 12 rows"),  # one block and a half
        (7, (6, 8), 2, "a rank holds 7 of 14 rows"),
        (8, (), 1, "must be positive"),
        (8, (4, 0), 1, "must be positive"),
    ],
)
def test_wrong_blocks_are_refused(rows, pattern, ranks, message):
    with pytest.raises(ConfigError, match=message):
        local_blocks(rows, pattern, ranks)


def test_a_mark_is_the_same_on_every_rank():
    for ranks in (1, 2, 8):
        part = weight(32 // ranks, partition_dim=0 if ranks > 1 else None)
        mark_row_blocks(part, (4,), ranks)
        assert block_rows(part) == (4,) and number_of_blocks(part, ranks) == 8


def test_a_replicated_weight_is_whole():
    part = weight(12)
    mark_row_blocks(part, (3,), 4)
    assert number_of_blocks(part, 4) == 4
    with pytest.raises(ConfigError, match="must divide the 12 rows"):
        mark_row_blocks(part, (48,), 4)


def test_columns_are_refused():
    with pytest.raises(ConfigError, match="divided along dim 1"):
        mark_row_blocks(weight(12, partition_dim=1), (3,), 2)
    with pytest.raises(ConfigError, match="rows of a matrix"):
        mark_row_blocks(torch.nn.Parameter(torch.zeros(12)), (3,), 1)


def test_what_is_left_to_adamw():
    matrix, vector, table, embedding = weight(8), torch.zeros(8), weight(8), weight(8)
    mark_table(table)
    embedding.is_embedding_or_output_parameter = True
    left = [is_left_to_adamw(p) for p in (matrix, vector, table, embedding)]
    assert left == [False, True, True, True]
