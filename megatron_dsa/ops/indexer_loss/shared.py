"""Indexer loss on the mean teacher of all layers that share a selection.

Layers pass the selection as a float tensor with the bits of its integers and return head sums as
the tensor's gradient. Autograd adds head sums per microbatch, also under recomputation, and runs
the loss, which normalises the sum, after all layers' attention backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.sample import QuerySample, sample_size, sampled_tokens
from megatron_dsa.ops.indexer_loss.training import (
    IndexerTraining,
    TeacherPart,
)

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class SharedSelection(NamedTuple):
    """Integer tensors of an unpacked selection, int32 (int64 for fp64 models).

    ``indices [tokens, K]``, ``length [tokens]``, and ``drawn [1]`` from
    :func:`.sample.draw_number`.
    """

    indices: torch.Tensor
    length: torch.Tensor
    drawn: torch.Tensor

    def pack(self, dtype: torch.dtype) -> torch.Tensor:
        drawn = self.drawn.expand(len(self.length))
        columns = [self.indices, self.length[:, None], drawn[:, None]]
        return torch.cat([x.to(_INTEGERS[dtype]) for x in columns], dim=1).view(dtype)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> SharedSelection:
        integers = packed.detach().view(_INTEGERS[packed.dtype])
        return cls(integers[:, :-2], integers[:, -2], integers[:1, -1])


@dataclass(frozen=True)
class HeadSums:
    """Channel from an attention layer's head sums to a shared selection's loss.

    Attributes:
        packed: selection from :func:`train_on_selection`, or an alias in a later layer.
        drawn: sample offset from the packed selection; ``None``: all query tokens.
    """

    packed: Any
    share: float
    drawn: torch.Tensor | None
    selected_only: bool = False
    head_group: Any = None  # the loss all-reduces head sums once for all layers

    @classmethod
    def of(cls, packed: torch.Tensor, share: float) -> HeadSums:
        drawn = None
        if sample_size(len(packed), share) is not None:
            drawn = SharedSelection.unpack(packed).drawn.clone()
        return cls(packed, share, drawn)

    def separate(self, **queries: torch.Tensor) -> tuple[HeadSums, tuple[torch.Tensor, ...]]:
        for name, x in queries.items():
            require(
                len(x) == len(self.packed),
                f"{name} must have one entry per query of the shared selection "
                f"({len(self.packed)}), got {len(x)}: give the selection of the same tokens",
            )
        return replace(self, packed=None), (self.packed,)

    def sample(self, total: int, device: torch.device) -> QuerySample | None:
        return _sample(total, self.share, self.drawn)

    def gradients(
        self,
        tensors: Iterable[torch.Tensor],
        parts: Iterable[TeacherPart],
        policy: Policy,
        sample: QuerySample | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        (packed,) = tensors
        width = packed.shape[1] - 2
        found = torch.empty_like(packed) if sample is None else torch.zeros_like(packed)
        found[:, width:] = 0.0
        columns = found[:, :width]
        for part in parts:
            taken = part.tokens if sample is None else sample.tokens[part.tokens]
            columns[taken] = part.teacher.to(found.dtype)
            del part
        return (found,)


def _sample(total: int, share: float, drawn: torch.Tensor | None) -> QuerySample | None:
    size = sample_size(total, share)
    return None if size is None or drawn is None else sampled_tokens(total, size, drawn[0].long())


def train_on_selection(
    selection: SharedSelection,
    dtype: torch.dtype,
    training: IndexerTraining | None,
    policy: Policy,
    ascending: bool = False,
) -> torch.Tensor:
    """Return a packed selection whose backward trains the indexer on all layers' head sums.

    Args:
        selection: for the query tokens of ``training.layout``.
        dtype: fp32, or fp64 for fp64 inputs.
        training: ``None`` in passes without gradients.
        ascending: head sums are in ascending order of the keys.

    Returns:
        ``[tokens, K + 2]``, for :meth:`HeadSums.of` in every layer.
    """
    if training is None:
        return selection.pack(dtype)
    training, tensors = training.separate(indices=selection.indices)
    return _SelectionLoss.apply(*selection, dtype, _Settings(training, policy, ascending), *tensors)


@dataclass(frozen=True)
class _Settings:
    training: IndexerTraining
    policy: Policy
    ascending: bool

    def parts(
        self, selection: SharedSelection, head_sums: torch.Tensor, sample: QuerySample | None
    ) -> Iterator[TeacherPart]:
        total, width = len(head_sums) if sample is None else len(sample.tokens), head_sums.shape[1]
        longest = items_within(self.policy.workspace_bytes // 8, 8 * width)
        for some in slices(total, longest) if total else [slice(0, 0)]:
            tokens = some if sample is None else sample.tokens[some]
            indices = selection.indices[tokens].int()
            if self.ascending:
                indices = in_ascending_order(indices)
            length = selection.length[tokens].int()
            teacher = head_sums[tokens, : width - 2]
            # Copy the teacher, which the loss overwrites.
            teacher = teacher.clone(memory_format=torch.contiguous_format)
            yield TeacherPart(some, indices.contiguous(), length.contiguous(), teacher)
            del indices, length, teacher


class _SelectionLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indices, length, drawn, dtype, s: _Settings, *tensors):
        packed = SharedSelection(indices, length, drawn).pack(dtype)
        ctx.save_for_backward(packed, *tensors)
        ctx.settings = s
        ctx.set_materialize_grads(False)
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx, head_sums):
        if head_sums is None:
            return (None,) * len(ctx.needs_input_grad)
        s: _Settings = ctx.settings
        packed, *tensors = ctx.saved_tensors
        selection = SharedSelection.unpack(packed)
        sample = _sample(len(packed), s.training.share, selection.drawn)
        parts = s.parts(selection, head_sums, sample)
        found = s.training.gradients(tensors, parts, s.policy, sample)
        return None, None, None, None, None, *found


def in_ascending_order(indices: torch.Tensor) -> torch.Tensor:
    last = torch.iinfo(indices.dtype).max
    ordered = indices.masked_fill(indices < 0, last).sort(dim=1).values
    return ordered.masked_fill_(ordered == last, -1)
