"""Test cases: shapes of sparse layers, layouts, and seeded index lists with edge cases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dsa.ops.common.arithmetic import items_within, slices, valid_entries
from megatron_dsa.ops.dispatch.support import short_dtype
from megatron_dsa.ops.layout.layout import Layout, QueryRange, bshd_layout, packed_layout

#: Number of queries that fill a GPU but run within seconds.
MAX_TIMED_TOKENS = 4096
BUDGET_BYTES = 2**30
#: Every eleventh key and the last key are never selected.
UNSELECTED_STEP = 11


@dataclass(frozen=True)
class Shape:
    """Shape of a model's absorbed attention (per rank) and indexer.

    Attributes:
        topk: keys per query.
        seq: number of keys.
        rows: query tokens compared with float64.
        packed: several sequences share the tokens.
        sink: a learned sink per head.
    """

    heads: int
    qk_dim: int
    v_dim: int
    index_heads: int
    index_dim: int
    topk: int
    seq: int
    rows: int
    packed: bool = False
    sink: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def timed_tokens(self) -> int:
        return min(self.seq, MAX_TIMED_TOKENS)

    def attention_label(self) -> str:
        label = f"H{self.heads} D{self.qk_dim}/{self.v_dim} K{self.topk} S{self.seq}"
        label += f" {short_dtype(self.dtype)}"
        return label + (" sink" if self.sink else "") + (" packed" if self.packed else "")

    def indexer_label(self) -> str:
        label = f"HI{self.index_heads} DI{self.index_dim} K{self.topk} S{self.seq}"
        return f"{label} {short_dtype(self.dtype)}" + (" packed" if self.packed else "")

    def on_cpu(self) -> Shape:
        limits = {
            "heads": 8, "index_heads": 8, "index_dim": 64, "topk": 64, "seq": 256, "rows": 32,
        }  # fmt: skip
        return dataclasses.replace(
            self, **{name: min(getattr(self, name), limit) for name, limit in limits.items()}
        )


def normal(device: torch.device, seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size, scale=1.0):
        return torch.randn(*size, generator=generator, device=device).mul_(scale)

    return draw


def chunks(tokens: int, bytes_per_token: int) -> Iterator[slice]:
    return slices(tokens, items_within(BUDGET_BYTES, bytes_per_token))


def sampled_tokens(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Return evenly spread, ascending query tokens, including the first and last token."""
    return torch.linspace(0, tokens - 1, count, device=device).long().unique()


def layout_of_tokens(layout: Layout, tokens: torch.Tensor) -> Layout:
    # The i-th token must be at or before slot first + i.
    first = int((tokens - torch.arange(len(tokens), device=tokens.device)).max())
    return dataclasses.replace(
        layout,
        num_queries=len(tokens),
        start=layout.start[tokens],
        end=layout.end[tokens],
        position=layout.position[tokens],
        real=None if layout.real is None else layout.real[tokens],
        query_ranges=(
            QueryRange(
                slice(0, len(tokens), 1), 0, first, layout.num_keys + len(tokens), layout.num_keys
            ),
        ),
    )


def visible_keys(layout: Layout, tokens: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    slots = torch.arange(layout.num_keys, device=layout.start.device)
    by_slot = (slots >= layout.start[tokens, None]) & (slots < layout.end[tokens, None])
    if layout.key_indices is None:
        return by_slot
    return torch.zeros_like(by_slot).index_copy_(1, layout.key_indices, by_slot)


def layout_of(shape: Shape, device: torch.device) -> Layout:
    """Return one causal sequence of ``seq`` tokens; if packed, four sequences and padding."""
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
        length: int32 ``[Sq]``, ``None`` if every entry counts.
        num_keys: entries of the key buffer.
    """

    indices: torch.Tensor
    length: torch.Tensor | None
    num_keys: int

    def take(self, tokens: torch.Tensor | slice) -> Lists:
        length = None if self.length is None else self.length[tokens]
        return dataclasses.replace(self, indices=self.indices[tokens], length=length)

    @cached_property
    def valid(self) -> torch.Tensor:
        """Bool ``[Sq, K]``, the entries that select a key."""
        return valid_entries(self.indices, self.length, self.num_keys)

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
    """Draw lists of visible keys in ascending order, with edge cases.

    Five of the longest lists get an edge case: length 0; only -1; -1 in the middle; ids
    ``num_keys`` and 2^31 - 1; valid ids past the length.
    """
    generator = torch.Generator().manual_seed(seed)
    start, end = layout.start.cpu(), layout.end.cpu()
    allowed = torch.ones(shape.seq, dtype=torch.bool)
    allowed[::UNSELECTED_STEP] = False
    allowed[-1] = False
    indices = torch.full((len(start), shape.topk), -1, dtype=torch.int32)
    length = torch.zeros(len(start), dtype=torch.int32)
    for query, (lo, hi) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        ids = allowed[lo:hi].nonzero().flatten() + lo
        if len(ids) > shape.topk:
            ids = ids[torch.randperm(len(ids), generator=generator)[: shape.topk].sort().values]
        indices[query, : len(ids)] = ids.int()
        length[query] = len(ids)
    _spoil(indices, length, shape.seq)
    device = layout.start.device
    return Lists(indices.to(device), length.to(device), shape.seq)


def _spoil(indices: torch.Tensor, length: torch.Tensor, num_keys: int) -> None:
    # Spoil every second list, so that valid lists remain between.
    longest = length.argsort(descending=True, stable=True)[::2].tolist()
    no_length, only_invalid, hole, past_the_end, stale = longest[:5]
    length[no_length] = 0
    indices[only_invalid] = -1
    middle = int(length[hole]) // 2
    indices[hole, middle] = -1
    last = int(length[past_the_end]) - 1
    indices[past_the_end, 0] = num_keys
    indices[past_the_end, last] = 2**31 - 1
    length[stale] = max(1, int(length[stale]) - 3)


def full_lists(shape: Shape, device: torch.device, seed: int = 3) -> Lists:
    """Draw full lists of ``timed_tokens`` queries, spread over all keys."""
    queries, keys = shape.timed_tokens, min(shape.topk, shape.seq)
    generator = torch.Generator(device).manual_seed(seed)
    offset = torch.randint(shape.seq, (queries, 1), generator=generator, device=device)
    ids = (torch.arange(keys, device=device) * shape.seq // keys + offset) % shape.seq
    indices = torch.full((queries, shape.topk), -1, dtype=torch.int32, device=device)
    indices[:, :keys] = ids.sort(-1).values.int()
    length = torch.full((queries,), keys, dtype=torch.int32, device=device)
    return Lists(indices, length, shape.seq)
