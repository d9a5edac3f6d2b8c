"""Gather of the same tokens from several tensors."""

from collections.abc import Sequence

import torch

from megatron_dsa.ops.common.scaling import has_triton


def select_tokens(tokens: torch.Tensor, *tensors: torch.Tensor | None) -> list:
    """Return ``x[tokens]`` for every tensor, without gradient, in one launch on a GPU.

    ``tokens`` is int64 ``[n]`` and in range; a tensor of ``None`` gives ``None``.
    """
    given = [x for x in tensors if x is not None]
    found = iter(_selected(tokens, given))
    return [None if x is None else next(found) for x in tensors]


def _selected(tokens: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if tokens.is_cuda and has_triton() and all(x.is_contiguous() for x in tensors):
        from megatron_dsa.ops.common.tokens_triton import select

        return select(tokens, tensors)
    return [x.detach()[tokens] for x in tensors]
