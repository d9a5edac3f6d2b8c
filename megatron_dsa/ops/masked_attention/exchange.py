"""What ranks exchange that attend for the same tokens, each with heads and lists of its own.

Tokens of a group lie one rank's after the other. Without a group there is nothing to exchange.
"""

from typing import Any

import torch


def gather_tokens(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return ``x [tokens, ...]`` of all ranks, ``[tokens * ranks, ...]``."""
    if group is None:
        return x
    gathered = x.new_empty(len(x) * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def sum_own_tokens(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's tokens of the sum of ``x [tokens * ranks, ...]`` over ranks."""
    if group is None:
        return x
    own = x.new_empty(len(x) // group.size(), *x.shape[1:])
    torch.distributed.reduce_scatter_tensor(own, x.contiguous(), group=group)
    return own
