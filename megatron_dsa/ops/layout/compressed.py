"""Compressed keys: groups of positions pooled into one key.

DeepSeek-V4 pools ``ratio`` consecutive positions into one key, except a sequence's tail. A query at
position ``t`` attends to the groups that end at or before ``t``: ``g < floor((t + 1) / ratio)``.

Compressed keys are ordered in *compressed slots*. A packed sequence that starts at token ``o`` has
the slots from ``o // ratio`` on, so slots are unique without counting groups but may be empty.
"""

import dataclasses
from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.layout.halo import Halo, halo_of
from megatron_dsa.ops.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class Groups:
    """Tokens pooled in each compressed slot.

    Without packing, each batch element has an equal number of consecutive slots.

    Attributes:
        first_token: int32 ``[G]``, index of the group's first token, or -1 for an empty slot.
        position: int64 ``[G]``, position of that token; 0 if there is no previous group.
        token_step: index distance of consecutive positions, 1 if packed, else the batch size.
    """

    first_token: torch.Tensor
    position: torch.Tensor
    token_step: int


@dataclass(frozen=True, eq=False)
class CompressedKeys:
    """Compressed keys of one microbatch at one ratio.

    Attributes:
        layout: visibility of compressed slots.
        groups: local groups, as indices of the microbatch or of the extended tokens of ``halo``.
        halo: other ranks' tokens in local groups; ``None`` if one rank holds all tokens.
        key_indices: int64 ``[count]``, slot -> index in the compressed keys of all ranks, past the
            end for empty slots; ``None`` on one rank.
    """

    ratio: int
    layout: Layout
    groups: Groups
    halo: Halo | None = None
    key_indices: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.layout.num_keys

    @property
    def pooled_tokens(self) -> int:
        if self.halo is None:
            return self.layout.num_queries
        return self.halo.length * self.groups.token_step


def compressed_keys(layout: Layout, ratio: int, overlap: bool = False) -> CompressedKeys:
    """Return the compressed keys of all tokens of ``layout`` at ``ratio``.

    ``overlap``: a group also pools the previous group's positions.
    """
    require(ratio >= 2, f"ratio must be at least 2, got {ratio}: pass the layer's ratio")
    key = ("compressed", ratio, overlap)
    return layout.derive(key, lambda: _compress(layout, ratio, overlap))


def visible_groups(layout: Layout, ratio: int) -> Layout:
    length = max(layout.all_tokens.max_length, 1)
    elements, per_element = _slot_counts(layout, ratio)
    first = _first_slots(layout, ratio)
    return dataclasses.replace(
        layout,
        num_keys=elements * per_element,
        start=first.int(),
        end=(first + (layout.end - layout.start) // ratio).int(),
        key_indices=None,
        query_ranges=tuple(
            dataclasses.replace(
                query_range,
                origin=query_range.origin // length * per_element,
                ceiling=elements * per_element,
                ratio=ratio,
            )
            for query_range in layout.query_ranges
        ),
        max_length=min(layout.max_length // ratio, per_element),
        global_layout=None,
        key_ownership=None,
        sequences=None,
    )


def _slot_counts(layout: Layout, ratio: int) -> tuple[int, int]:
    global_layout = layout.all_tokens
    if layout.packed:
        return 1, global_layout.num_keys // ratio
    length = global_layout.max_length
    # Without tokens the batch size is unknown, so assume 1.
    return max(global_layout.num_keys // max(length, 1), 1), length // ratio


def _first_slots(layout: Layout, ratio: int) -> torch.Tensor:
    start = layout.start.long()
    if layout.packed:
        return start // ratio
    return start // max(layout.all_tokens.max_length, 1) * _slot_counts(layout, ratio)[1]


def _compress(layout: Layout, ratio: int, overlap: bool) -> CompressedKeys:
    global_layout = layout.all_tokens
    elements, per_element = _slot_counts(layout, ratio)
    visibility = visible_groups(layout, ratio)
    completes = global_layout.position % ratio == ratio - 1
    if global_layout.real is not None:
        completes &= global_layout.real
    slots = _first_slots(global_layout, ratio) + global_layout.position // ratio
    if layout.key_ownership is None:
        tokens = torch.arange(global_layout.num_keys, device=slots.device)
        groups = _groups(tokens, completes, global_layout.position, ratio, elements, per_element)
        return CompressedKeys(ratio, visibility, groups)
    keys, reach = layout.key_ownership, ratio * (2 if overlap else 1) - 1
    halo = halo_of(layout, keys.sharding, reach)
    step, mine = keys.batch, keys.sharding.rank
    element = torch.arange(step, device=slots.device)
    tokens_of = (keys.table[..., None] * step + element).flatten(1)
    per_element = halo.length // ratio
    local = tokens_of[mine]
    # True if the halo holds the previous group, which is not in the same run.
    before = torch.ones_like(halo.runs[mine], dtype=torch.bool)
    before[ratio:] = halo.runs[mine, ratio:] != halo.runs[mine, :-ratio]
    groups = _groups(
        (halo.local[:, None] * step + element).flatten(),
        completes[local],
        global_layout.position[local],
        ratio,
        step,
        per_element,
        before.repeat_interleave(step, output_size=local.numel()) if overlap else None,
    )
    extended = torch.arange(keys.table.shape[1], device=slots.device) + reach * (halo.runs + 1)
    pooled = (extended - (ratio - 1)).div(ratio, rounding_mode="floor")[..., None]
    rank = torch.arange(keys.sharding.ranks, device=slots.device)[:, None, None]
    pooled = (pooled + per_element * (element + step * rank)).flatten()
    spare = keys.sharding.ranks * step * per_element
    of_slot = torch.full((visibility.num_keys + 1,), spare, device=slots.device)
    goal = torch.where(completes, slots, visibility.num_keys)[tokens_of.flatten()]
    of_slot.scatter_(0, goal, pooled)
    return CompressedKeys(ratio, visibility, groups, halo, of_slot[:-1])


def _groups(
    tokens, completes, position, ratio: int, step: int, per_element: int, alone=None
) -> Groups:
    """Return the groups whose last tokens are among ``tokens``.

    ``alone`` marks groups that follow another rank's group. The local rank also pools that
    group, because the backward needs its slot, and discards the result.
    """
    first = tokens - (ratio - 1) * step
    slot = first % step * per_element + first.div(step * ratio, rounding_mode="floor")
    # Tokens that complete no group write to a spare slot.
    spare = step * per_element
    first_token = torch.full((spare + 1,), -1, dtype=torch.int32, device=tokens.device)
    begins = torch.zeros(spare + 1, dtype=torch.int64, device=tokens.device)
    if alone is not None:
        goal = torch.where(completes & alone & (position >= 2 * ratio - 1), slot - 1, spare)
        first_token.scatter_(0, goal, (first - ratio * step).int())
    goal = torch.where(completes, slot, spare)
    first_token.scatter_(0, goal, first.int())
    begins.scatter_(0, goal, position - (ratio - 1))
    return Groups(first_token[:-1], begins[:-1], step)
