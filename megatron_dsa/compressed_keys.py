"""Which groups of positions are compressed into a key, and which query row sees which of them.

DeepSeek-V4 pools ``ratio`` consecutive positions of a sequence into one compressed key. Group ``g``
of a sequence holds its positions ``g * ratio ... (g + 1) * ratio - 1``; the tail of a sequence is
not compressed. A query at position ``t`` sees the groups that end at or before ``t``:
``g < floor((t + 1) / ratio)``.

The compressed keys of all sequences lie in order in *compressed slots*, so that every query row
sees a contiguous range of them: to the indexer and its losses they are a
:class:`~megatron_dsa.layout.Layout` like any other. A packed sequence that starts at row ``o`` has
the slots from ``o // ratio`` on: no two groups meet there, and nobody has to count the groups of
the sequences before. Some slots in between hold no group.
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

    Without a host synchronisation.
    """
    cached = layout.derived.get(("compressed", ratio))
    if cached is None:
        cached = layout.derived["compressed", ratio] = _compress(layout, ratio)
    return cached


@torch.inference_mode(False)  # what is cached is used in training, too
def _compress(layout: Layout, ratio: int) -> CompressedKeys:
    packed = layout.real is not None
    lengths = [len(window) for window in layout.windows]
    slots = layout.num_keys // ratio if packed else sum(n // ratio for n in lengths)
    if packed:
        begin = layout.start // ratio
    else:
        # Every batch element has the same length.
        begin = layout.start // max(lengths[0], 1) * (lengths[0] // ratio)
    begin = begin.long()
    seen = (layout.end - layout.start) // ratio
    completes = layout.position % ratio == ratio - 1  # the last position of a group
    if packed:
        completes &= layout.real
    # Rows that complete no group are written to a spare place, which is cut off.
    place = torch.where(completes, begin + layout.position // ratio, slots)
    step = layout.windows[0].rows.step
    rows = torch.arange(layout.num_keys, device=begin.device)
    first_row = torch.full((slots + 1,), -1, dtype=torch.int32, device=begin.device)
    first_row.scatter_(0, place, (rows - (ratio - 1) * step).int())
    position = torch.zeros(slots + 1, dtype=torch.int64, device=begin.device)
    position.scatter_(0, place, layout.position - (ratio - 1))

    visibility = dataclasses.replace(
        layout,
        num_keys=slots,
        start=begin.int(),
        end=(begin + seen).int(),
        key_rows=None,
        windows=tuple(_windows(layout, ratio)),
        max_length=min(layout.max_length // ratio, slots),
        derived={},
    )
    return CompressedKeys(ratio, visibility, Groups(first_row[:-1], position[:-1], step))


def _windows(layout: Layout, ratio: int):
    """Yield the bounds on compressed slots."""
    first = 0
    for window in layout.windows:
        yield Window(window.rows, first, window.lookback, first, ratio)
        first += len(window) // ratio
