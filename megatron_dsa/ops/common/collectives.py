"""Collectives along dim 0 without autograd; no-ops on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Transfer:
    result: torch.Tensor | None = None
    work: Any = None

    def take_over(self, other: Transfer) -> torch.Size:
        assert other.result is not None
        self.result, self.work = other.result, other.work
        return other.result.shape

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        result, self.result = self.result, None
        assert result is not None
        return result


def several(group) -> bool:
    return group is not None and group.size() > 1


def all_gather_async(x: torch.Tensor, group) -> Transfer:
    if not several(group):
        return Transfer(x.detach())
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = torch.distributed.all_gather_into_tensor(
        gathered, x.detach().contiguous(), group=group, async_op=True
    )
    return Transfer(gathered, work)


def reduce_scatter_async(x: torch.Tensor, group) -> Transfer:
    if not several(group):
        return Transfer(x)
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    work = torch.distributed.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=True)
    return Transfer(part, work)


def exchange_parts(
    tensors: Sequence[torch.Tensor], holders: int, parts: int, group: Any
) -> list[torch.Tensor]:
    """Exchange sums over local heads, so that each rank has all heads' sums for its tokens.

    Args:
        tensors: ``[parts * holders * n, ...]`` of 32 or 64 bits: the tokens of this rank's parts,
            ordered by holder within a part.
        holders: number of ranks of ``group`` with different tokens; 1 if all have the same.
        parts: number of parts for which this rank's heads are the teacher.

    Returns:
        A tensor ``[parts of all ranks * n, ...]`` of local tokens per input.
    """
    sent = torch.cat([x.view(torch.int32).view(len(x), -1) for x in tensors], dim=1)
    if holders == 1:
        found = all_gather_async(sent, group).wait()
    else:
        of_holders = sent.unflatten(0, (parts, holders, -1)).transpose(0, 1).contiguous()
        found = torch.empty_like(sent)
        torch.distributed.all_to_all_single(found, of_holders.flatten(0, 2), group=group)
    sizes = [x.view(torch.int32)[:1].numel() for x in tensors]
    return [
        part.contiguous().view(x.dtype).view(len(found), *x.shape[1:])
        for part, x in zip(found.split(sizes, dim=1), tensors, strict=True)
    ]
