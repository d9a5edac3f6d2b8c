"""Muon's reading of the marks on parameters (:mod:`megatron_dsa.layers.weight_blocks`)."""

from typing import Any

import torch

from megatron_dsa.layers.weight_blocks import IS_TABLE, block_rows, is_sharded


def is_left_to_adamw(parameter: torch.Tensor) -> bool:
    """Return whether AdamW updates a parameter when ``--optimizer muon`` is given.

    DeepSeek-V4's rule: AdamW for embedding and output head, norms, and the base and scale vectors
    of hyper-connections; Muon for all other matrices.
    """
    embeds = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() != 2 or bool(embeds) or getattr(parameter, IS_TABLE, False)


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
