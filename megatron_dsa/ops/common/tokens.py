"""Selection of tokens from several tensors at once."""

from collections.abc import Sequence

import torch

from megatron_dsa.ops.common.scaling import has_triton


def select_tokens(tokens: torch.Tensor, *tensors: torch.Tensor | None) -> list:
    """Return ``x[tokens]`` of every tensor, without gradient; one launch on a GPU.

    ``tokens``: int64 ``[n]``, all in range; ``None`` is returned as it is.
    """
    given = [x for x in tensors if x is not None]
    found = iter(_selected(tokens, given))
    return [None if x is None else next(found) for x in tensors]


def _selected(tokens: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if tokens.is_cuda and has_triton() and all(x.is_contiguous() for x in tensors):
        from megatron_dsa.ops.common.tokens_triton import select

        return select(tokens, tensors)
    return [x.detach()[tokens] for x in tensors]
