"""The keys of a query in V4's attention, described by ranges and written out block by block.

A query attends to the last positions of its sequence (the window) and to compressed keys: those
that the indexer selected, or all that it sees. Only the selection is a tensor; the rest are two
ranges per query token. The attention kernels want one list per query, so lists are written for as
many tokens at a time as fit the workspace, in the forward and again in the backward, never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.arithmetic import rows_in_budget
from megatron_dsa.ops.common.checks import require_tensor
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.key_lists.declaration import KEY_LISTS
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.layout import Layout

#: Bytes per list entry of the torch builder (masks, sums, copies) and of a kernel: the entry, and
#: its copy in a list that an attention kernel wants wider.
_BYTES_UNFUSED, _BYTES_FUSED = 48, 8


@dataclass(frozen=True, eq=False)
class KeyLists:
    """Window and compressed keys of every query token of a microbatch.

    The key buffer holds the compressed keys, then the ``layout.num_keys`` rows of the sequence.
    So do lists: the columns of a selection are the same in all tokens, and where nothing is
        selected
    lists are ascending, as the backward likes them.

    Attributes:
        layout: sequences and visibility.
        window: number of latest positions that a query sees, its own included.
        compressed: compressed keys of the layer, ``None`` if it has only the window.
        selected: int32 ``[Sq, topk]``, compressed slots that were selected, valid entries first;
            ``None``: all visible ones.
        selected_length: int32 ``[Sq]``, number of valid entries.
        held: int64 ``[slots]``, where the key of a position lies behind the compressed keys;
            ``None``: where the layout says (all ranks' keys).

    Raises:
        ConfigError: the tensors do not fit the layout, or each other.
    """

    layout: Layout
    window: int
    compressed: CompressedKeys | None = None
    selected: torch.Tensor | None = None
    selected_length: torch.Tensor | None = None
    held: torch.Tensor | None = None

    def __post_init__(self):
        queries, start = self.layout.num_queries, self.layout.start
        require(self.window >= 0, f"window must not be negative, got {self.window}: count tokens")
        if self.compressed is not None:
            require(
                self.compressed.layout.num_queries == queries,
                f"compressed must have the {queries} query tokens of layout, got "
                f"{self.compressed.layout.num_queries}: make it with compressed_keys(layout, ...)",
            )
        if self.selected is not None:
            require(
                self.compressed is not None and self.selected_length is not None,
                "selected needs compressed and selected_length: pass all results of indexer_topk",
            )
            fix = "select for the same batch"
            int32 = (torch.int32,)
            require_tensor("selected", self.selected, (queries, "topk"), int32, start, fix)
            assert self.selected_length is not None
            require_tensor("selected_length", self.selected_length, (queries,), int32, start, fix)

    @property
    def offset(self) -> int:
        """Row of the key buffer where the keys of positions start."""
        return 0 if self.compressed is None else self.compressed.count

    def width(self, rows: slice) -> int:
        """Return the list width for query rows ``rows``: no list is longer.

        Blocks of ever longer lists get powers of two, because cuDNN compiles for a width.
        """
        window = min(self.window, self.layout.widest(rows))
        if self.compressed is None:
            return max(window, 1)
        if self.selected is not None:
            return self.selected.shape[1] + window
        longest = window + self.compressed.layout.widest(rows)
        return max(1, min(self.full_width, 1 << (longest - 1).bit_length()))

    @property
    def full_width(self) -> int:
        """The width that fits every token."""
        window = min(self.window, self.layout.max_length)
        if self.compressed is None:
            return max(window, 1)
        if self.selected is not None:
            return self.selected.shape[1] + window
        return max(window + self.compressed.layout.max_length, 1)

    def blocks(self, policy: Policy) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield ``rows, indices int32 [r, width], length int32 [r]`` for all query tokens.

        Rows of the key buffer, compact, ``-1`` padded.
        """
        call = describe_call(
            self.layout.start.device, dtype=torch.int32, heads=1, qk_dim=0, v_dim=0
        )
        fused = KEY_LISTS.choose(call, policy).candidate.fused
        bytes_per_row = self.full_width * (_BYTES_FUSED if fused else _BYTES_UNFUSED)
        rows_at_once = rows_in_budget(policy.workspace_bytes, bytes_per_row)
        total = self.layout.num_queries
        for first in range(0, total, rows_at_once):
            rows = slice(first, min(total, first + rows_at_once))
            yield rows, *KEY_LISTS.run(call, policy, self._inputs(rows))

    def _inputs(self, rows: slice) -> ListInputs:
        group_start = group_end = None
        if self.compressed is not None and self.selected is None:
            group_start = self.compressed.layout.start[rows]
            group_end = self.compressed.layout.end[rows]
        selected = length = None
        if self.selected is not None:
            assert self.selected_length is not None
            selected, length = self.selected[rows], self.selected_length[rows]
        return ListInputs(
            start=self.layout.start[rows],
            end=self.layout.end[rows],
            window=self.window,
            key_rows=self.layout.key_rows if self.held is None else self.held,
            offset=self.offset,
            selected=selected,
            selected_length=length,
            group_start=group_start,
            group_end=group_end,
            width=self.width(rows),
        )


@dataclass(frozen=True, eq=False)
class ListInputs:
    """Ranges and selections of a block of query tokens, as every implementation receives them.

    The key buffer holds the compressed keys in the order of their slots, then the keys of
    positions. The list of row ``r`` has ``n`` compressed slots, then the last ``w = min(window, end
    - start)`` window slots in ascending order as rows of the key buffer, then -1.
    A list that is longer than ``width`` loses compressed entries from behind. Tensors may be slices
    of rows (with step 1) of larger ones.

    Attributes:
        start, end: int32 ``[tokens]``; slots ``[start, end)`` are the token's own sequence up to
            and including the token itself. ``start == end`` for padding tokens.
        window: how many of them, from behind, belong to the list.
        key_rows: int64 ``[slots]`` slot -> row behind ``offset``; ``None`` for the identity.
        offset: row of the key buffer where the keys of positions start.
        selected: int32 ``[tokens, topk]`` or ``None``; compressed slots chosen by the indexer,
            valid ones first, -1 behind.
        selected_length: int32 ``[tokens]`` or ``None``; how many of ``selected`` are valid.
            ``None``: those that are not negative.
        group_start, group_end: int32 ``[tokens]`` or ``None``, used if ``selected`` is ``None``:
            all compressed slots ``[group_start, group_end)``. Both ``None``: no compressed keys.
        width: columns of the result, at least the longest list.
    """

    start: torch.Tensor
    end: torch.Tensor
    window: int
    key_rows: torch.Tensor | None
    offset: int
    selected: torch.Tensor | None
    selected_length: torch.Tensor | None
    group_start: torch.Tensor | None
    group_end: torch.Tensor | None
    width: int

    def __post_init__(self):
        rows = self.start.shape
        per_row = (self.end, self.selected_length, self.group_start, self.group_end)
        if len(rows) != 1 or any(x is not None and x.shape != rows for x in per_row):
            raise ConfigError(
                "start, end, selected_length, group_start and group_end must have the shape "
                f"[rows] = {list(rows)}, got "
                f"{[None if x is None else list(x.shape) for x in per_row]} for the last four: "
                "slice all of them alike."
            )
        if self.selected is not None and (
            self.selected.dim() != 2 or self.selected.shape[:1] != rows
        ):
            raise ConfigError(
                f"selected must have the shape [rows, topk] with {rows[0]} rows, got "
                f"{list(self.selected.shape)}: pass the indexer's result for these rows."
            )
        if (self.group_start is None) != (self.group_end is None):
            raise ConfigError(
                "group_start and group_end must both be given or both be None: pass the bounds of "
                "the visible compressed slots."
            )
        if self.width < 0 or self.window < 0:
            raise ConfigError(
                f"width and window must not be negative, got {self.width} and {self.window}: pass "
                "the longest list and the layer's window."
            )
