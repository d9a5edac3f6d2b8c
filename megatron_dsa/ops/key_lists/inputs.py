"""Index lists of V4's attention: the compressed keys of a query row, then its window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.errors import ConfigError


@dataclass(frozen=True, eq=False)
class ListInputs:
    """What the lists are made of, as every implementation receives it.

    The key buffer holds the compressed keys in the order of their slots, then the keys of
    positions. The list of row ``r`` has ``n`` compressed slots, then the last ``w = min(window, end
    - start)`` window slots in ascending order as rows of the key buffer, then -1.
    A list that is longer than ``width`` loses compressed entries from behind. Tensors may be slices
    of rows (with step 1) of larger ones.

    Attributes:
        start, end: int32 ``[rows]``; slots ``[start, end)`` are the row's own sequence up to and
            including the row itself. ``start == end`` for padding rows.
        window: how many of them, from behind, belong to the list.
        key_rows: int64 ``[slots]`` slot -> row behind ``offset``; ``None`` for the identity.
        offset: row of the key buffer where the keys of positions start.
        selected: int32 ``[rows, topk]`` or ``None``; compressed slots chosen by the indexer, valid
            ones first, -1 behind.
        selected_length: int32 ``[rows]`` or ``None``; how many of ``selected`` are valid. ``None``:
            those that are not negative.
        group_start, group_end: int32 ``[rows]`` or ``None``, used if ``selected`` is ``None``: all
            compressed slots ``[group_start, group_end)``. Both ``None``: no compressed keys.
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
