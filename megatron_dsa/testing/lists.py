"""Seeded index lists: ordinary ones, and among them those on which kernels are known to fail."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dsa.ops.layout.layout import Layout, bshd_layout, packed_layout
from megatron_dsa.testing.shapes import Shape

#: Every so many keys one is selected by no query, besides the first and the last.
UNSELECTED_STEP = 11


def layout_of(shape: Shape, device: torch.device) -> Layout:
    """Return one causal sequence of ``seq`` tokens, or four (one very short) and padding."""
    if not shape.packed:
        return bshd_layout(shape.seq, 1, device)
    ends = [0, shape.seq * 2 // 5, shape.seq * 2 // 5 + 5, shape.seq * 9 // 10, shape.seq - 3]
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    return packed_layout(
        torch.tensor(ends, dtype=torch.int32, device=device), shape.seq, max_seqlen=longest
    )


@dataclass(frozen=True)
class Lists:
    """Index lists of query tokens over ``num_keys`` keys.

    Attributes:
        indices: int32 ``[Sq, K]``, with entries that select nothing.
        length: int32 ``[Sq]``, or ``None``: every entry counts.
        num_keys: rows of the key buffer.
    """

    indices: torch.Tensor
    length: torch.Tensor | None
    num_keys: int

    def take(self, tokens: torch.Tensor | slice) -> Lists:
        """Return the lists of some query tokens."""
        length = None if self.length is None else self.length[tokens]
        return dataclasses.replace(self, indices=self.indices[tokens], length=length)

    @cached_property
    def valid(self) -> torch.Tensor:
        """Bool ``[Sq, K]``, the entries that select a key."""
        valid = (self.indices >= 0) & (self.indices < self.num_keys)
        if self.length is None:
            return valid
        place = torch.arange(self.indices.shape[1], device=valid.device)
        return valid & (place < self.length[:, None])

    @cached_property
    def empty(self) -> torch.Tensor:
        """Bool ``[Sq]``, query tokens that select nothing."""
        return ~self.valid.any(-1)

    @cached_property
    def unselected(self) -> torch.Tensor:
        """Bool ``[Skv]``, keys that no query selects."""
        unselected = torch.ones(self.num_keys, dtype=torch.bool, device=self.indices.device)
        unselected[self.indices[self.valid].long()] = False
        return unselected


def difficult_lists(shape: Shape, layout: Layout, seed: int = 1) -> Lists:
    """Draw lists of visible keys in ascending order, some of them spoilt on purpose.

    ``layout`` is that of the sampled tokens. Among those with the most keys, one row has length 0,
    one holds nothing but -1, one has a -1 in the middle, one an id equal to the number of keys and
    one of 2^31 - 1, and one stale (real) ids past its length.
    """
    generator = torch.Generator().manual_seed(seed)
    start, end = layout.start.cpu(), layout.end.cpu()
    allowed = torch.ones(shape.seq, dtype=torch.bool)
    allowed[::UNSELECTED_STEP] = False
    allowed[-1] = False
    indices = torch.full((len(start), shape.topk), -1, dtype=torch.int32)
    length = torch.zeros(len(start), dtype=torch.int32)
    for row, (lo, hi) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        ids = allowed[lo:hi].nonzero().flatten() + lo
        if len(ids) > shape.topk:
            ids = ids[torch.randperm(len(ids), generator=generator)[: shape.topk].sort().values]
        indices[row, : len(ids)] = ids.int()
        length[row] = len(ids)
    _spoil(indices, length, shape.seq)
    device = layout.start.device
    return Lists(indices.to(device), length.to(device), shape.seq)


def _spoil(indices: torch.Tensor, length: torch.Tensor, num_keys: int) -> None:
    # Every second of the longest rows, so that each has an ordinary neighbour to disturb.
    longest = length.argsort(descending=True, stable=True)[::2].tolist()
    no_length, only_invalid, hole, past_the_end, stale = longest[:5]
    length[no_length] = 0  # its ids stay listed
    indices[only_invalid] = -1
    middle = int(length[hole]) // 2
    indices[hole, middle] = -1
    last = int(length[past_the_end]) - 1
    indices[past_the_end, 0] = num_keys
    indices[past_the_end, last] = 2**31 - 1
    length[stale] = max(1, int(length[stale]) - 3)


def full_lists(shape: Shape, device: torch.device, seed: int = 3) -> Lists:
    """Draw lists of ``timed_rows`` queries, each full of distinct keys spread over all of them."""
    rows, keys = shape.timed_rows, min(shape.topk, shape.seq)
    generator = torch.Generator(device).manual_seed(seed)
    offset = torch.randint(shape.seq, (rows, 1), generator=generator, device=device)
    ids = (torch.arange(keys, device=device) * shape.seq // keys + offset) % shape.seq
    indices = torch.full((rows, shape.topk), -1, dtype=torch.int32, device=device)
    indices[:, :keys] = ids.sort(-1).values.int()
    length = torch.full((rows,), keys, dtype=torch.int32, device=device)
    return Lists(indices, length, shape.seq)
