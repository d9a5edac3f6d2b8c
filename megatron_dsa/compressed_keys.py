"""Which groups of positions are compressed into a key, and which query row sees which of them.

DeepSeek-V4 pools ``ratio`` consecutive positions of a sequence into one compressed key. Group ``g``
of a sequence holds its positions ``g * ratio ... (g + 1) * ratio - 1``; the tail of a sequence is
not compressed. A query at position ``t`` sees the groups that end at or before ``t``:
``g < floor((t + 1) / ratio)``.

The compressed keys of all sequences lie one after the other in *compressed slots*, so that every
query row sees a contiguous range of them: to the indexer and its losses they are a
:class:`~megatron_dsa.layout.Layout` like any other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_dsa.layout import Layout, Window
from megatron_dsa.ops.compressor import Groups


@dataclass(frozen=True, eq=False)
class CompressedKeys:
    """The compressed keys of one microbatch at one ratio.

    Attributes:
        ratio: positions per key.
        layout: visibility of compressed slots for the query rows; slots are rows of the compressed
            keys.
        groups: the rows that each slot pools.
    """

    ratio: int
    layout: Layout
    groups: Groups

    @property
    def count(self) -> int:
        """Number of compressed slots, an upper bound of the number of groups."""
        return self.layout.num_keys


def compressed_keys(layout: Layout, ratio: int) -> CompressedKeys:
    """Return the compressed keys of ``layout`` (of all its rows) at ``ratio``.

    Without a host synchronisation: the number of slots is the number of groups if rows are not
    packed, else the bound ``rows // ratio``; slots without a group come last.
    """
    cached = layout.derived.get(("compressed", ratio))
    if cached is None:
        cached = layout.derived["compressed", ratio] = _compress(layout, ratio)
    return cached


def _compress(layout: Layout, ratio: int) -> CompressedKeys:
    rows, device = layout.num_keys, layout.start.device
    if layout.sequences is None:
        slots = sum(len(window) // ratio for window in layout.windows)
    else:
        slots = rows // ratio
    row_of_slot = layout.key_rows
    if row_of_slot is None:
        row_of_slot = torch.arange(rows, device=device)
    position = layout.position[row_of_slot]
    completes = position % ratio == ratio - 1  # the last position of a group
    if layout.real is not None:
        completes &= layout.real[row_of_slot]
    before = torch.nn.functional.pad(completes.cumsum(0), (1, 0))  # groups complete before a slot

    step = layout.windows[0].rows.step if layout.windows else 1
    # Slots that complete no group are written to a spare place, which is cut off.
    place = torch.where(completes, before[:-1], slots)
    first_row = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
    first_row.scatter_(0, place, (row_of_slot - (ratio - 1) * step).int())
    first_position = torch.zeros(slots + 1, dtype=torch.int64, device=device)
    first_position.scatter_(0, place, position - (ratio - 1))

    visibility = dataclasses.replace(
        layout,
        num_keys=slots,
        start=before[layout.start.long()].int(),
        end=before[layout.end.long()].int(),
        key_rows=None,
        windows=tuple(_windows(layout, ratio)),
        max_length=min(layout.max_length // ratio, slots),
        derived={},
    )
    groups = Groups(first_row[:-1], first_position[:-1], step)
    return CompressedKeys(ratio, visibility, groups)


def _windows(layout: Layout, ratio: int):
    """Yield the bounds on compressed slots."""
    first = 0
    for window in layout.windows:
        lookback, slack = window.lookback, 0
        if layout.sequences is not None:
            # Every sequence before may have left a tail uncompressed; padding between sequences
            # has no bound that the host knows.
            lookback = len(window) if layout.padded else lookback
            slack = layout.sequences
        yield Window(window.rows, first, lookback, first, ratio, slack)
        first += len(window) // ratio
