"""Causal visibility of keys per query, for packed and unpacked batches.

Megatron's ``[s, b, ...]`` is flattened to tokens ``s * B + b``. A *slot* is an index into the keys
in sequence order; every query attends to a contiguous range of slots. Layouts are computed on the
device without synchronisation.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.capture import capturing, tensor_cache
from megatron_dsa.ops.common.checks import require_cu_seqlens, require_tensor, require_values

if TYPE_CHECKING:
    from megatron_dsa.ops.layout.sharding import KeyOwnership


@dataclass(frozen=True)
class QueryRange:
    """Host-side bounds of the slots visible to a run of queries, to skip blocks of keys.

    Query ``i`` is within ``slack`` of position ``p = position + i * step`` in a sequence that
    begins at slot ``origin`` or later::

        slots  0 ......... origin ....... lowest ========== highest ....... ceiling
                           position 0            |<-lookback->|

        lowest = origin + max(0, p + 1 - lookback)      highest = min(origin + p + 1, ceiling)

    With ``ratio`` (compressed keys), ``lowest`` and ``highest`` use ``(...) // ratio``.

    Attributes:
        origin: lowest visible slot.
        position: position of the first query.
        lookback: upper bound of the sequence length.
        step: distance between queries' positions; more than 1 if ranks share a sequence.
        slack: maximum deviation of a position if lengths are only on the device.
        ratio: positions per slot.
    """

    tokens: slice
    origin: int
    position: int
    lookback: int
    ceiling: int
    step: int = 1
    slack: int = 0
    ratio: int = 1

    def __len__(self) -> int:
        return len(range(self.tokens.start, self.tokens.stop, self.tokens.step))

    def tokens_of(self, begin: int, end: int) -> slice:
        first, step = self.tokens.start, self.tokens.step
        return slice(first + begin * step, first + (end - 1) * step + 1, step)

    def bound(self, query: int) -> int:
        """Return a non-decreasing upper bound of the slots visible to ``query``."""
        position = self.position + query * self.step + self.slack
        return min(position + 1, self.lookback) // self.ratio

    def slots(self, begin: int, end: int) -> tuple[int, int]:
        first = self.position + begin * self.step - self.slack
        last = self.position + (end - 1) * self.step + self.slack
        lowest = self.origin + max(0, (first + 1 - self.lookback) // self.ratio)
        highest = min(self.origin + (last + 1) // self.ratio, self.ceiling)
        return min(lowest, highest), highest

    def covers(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        start, end = start[self.tokens], end[self.tokens]
        position = self.position + self.step * torch.arange(len(self), device=start.device)
        reach = (position - self.slack + 1 - self.lookback).div(self.ratio, rounding_mode="floor")
        lowest = self.origin + reach.clamp_min(0)
        highest = self.origin + (position + self.slack + 1).div(self.ratio, rounding_mode="floor")
        inside = (start >= lowest) & (end <= highest.clamp_max(self.ceiling))
        return (inside | (start == end)).all()


@dataclass(frozen=True)
class Block:
    """Query tokens of one query range, and the slots ``[lo, hi)`` of all visible keys.

    At most ``bound`` slots are visible to the first query.
    """

    tokens: slice
    lo: int
    hi: int
    ratio: int = 1
    bound: int = 0

    @property
    def width(self) -> int:
        return self.hi - self.lo

    @property
    def key(self) -> tuple[int, ...]:
        return self.tokens.start, self.tokens.stop, self.tokens.step, self.lo, self.hi


@dataclass(frozen=True, eq=False)
class Seen:
    """Visible columns of a block's queries, ``[start[i], end[i])`` for query ``i``.

    Attributes:
        start, end: int32 ``[tokens]``, contiguous, ``0 <= start <= end <= width``; column 0 is the
            block's first slot.
    """

    start: torch.Tensor
    end: torch.Tensor

    def columns(self, width: int) -> torch.Tensor:
        columns = torch.arange(width, device=self.start.device)
        return (columns >= self.start[:, None]) & (columns < self.end[:, None])

    def first(self, count: int) -> torch.Tensor:
        offset = torch.arange(count, dtype=torch.int32, device=self.start.device)
        columns = self.start[:, None] + offset
        return torch.where(columns < self.end[:, None], columns, -1)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a microbatch on all ranks.

    Attributes:
        batch: micro-batch size; 1 if packed.
        cu_seqlens, cu_seqlens_padded: int32 ``[n + 1]``, cumulative lengths of packed sequences
            without and with padding, or ``None``.
    """

    batch: int = 1
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_padded: torch.Tensor | None = None

    @property
    def count(self) -> int | None:
        return None if self.cu_seqlens is None else self.cu_seqlens.numel() - 1


@dataclass(frozen=True, eq=False)
class Layout:
    """Visibility of keys for flattened query tokens.

    Attributes:
        num_keys: number of keys, and slots, of the key buffer.
        start, end: int32 ``[num_queries]``, range of the slots visible to a query.
        position: int64 ``[num_queries]``, position in the sequence for rope.
        key_indices: int64 ``[num_keys]``, slot -> index in the key buffer; ``None``: the identity.
        real: bool ``[num_queries]``, ``False`` for padding; ``None`` if not :attr:`packed`.
        query_ranges: host-side bounds that cover every query token exactly once.
        max_length: host-side upper bound of the number of slots visible to a query.
        global_layout: layout of all ranks' query tokens, if sharded.
        key_ownership: the rank of each key, if sharded.
        sequences: ``None`` for ranges of slots that are not sequences.

    Raises:
        ConfigError: sizes do not fit; a range of slots exceeds the keys, which a GPU reports at its
            next synchronisation; a query range is too narrow, which only the CPU reports.
    """

    num_queries: int
    num_keys: int
    start: torch.Tensor
    end: torch.Tensor
    position: torch.Tensor
    key_indices: torch.Tensor | None
    real: torch.Tensor | None
    query_ranges: tuple[QueryRange, ...]
    max_length: int
    global_layout: Layout | None = None
    key_ownership: KeyOwnership | None = None
    sequences: Sequences | None = None
    #: Cache of :meth:`derive`, which ``replace`` empties because ranges may change.
    derived: dict = field(default_factory=dict, init=False, repr=False)
    #: Keys of cache entries that another layout's :meth:`derive_large` may evict.
    large: set = field(default_factory=set, init=False, repr=False)
    #: Whether a CUDA graph rewrites the layout's tensors in every replay.
    in_graph: bool = field(default_factory=lambda: capturing(), init=False, repr=False)

    def __post_init__(self):
        queries, keys = (self.num_queries,), (self.num_keys,)
        fix = "count as many tokens as the layout has"
        require_tensor("start", self.start, queries, (torch.int32,), fix=fix)
        require_tensor("end", self.end, queries, (torch.int32,), self.start, fix)
        require_tensor("position", self.position, queries, (torch.int64,), self.start, fix)
        if self.key_indices is not None:
            require_tensor("key_indices", self.key_indices, keys, (torch.int64,), self.start, fix)
        if self.real is not None:
            require_tensor("real", self.real, queries, (torch.bool,), self.start, fix)
        covered = sum(len(query_range) for query_range in self.query_ranges)
        require(
            covered == self.num_queries,
            "query_ranges must cover each of the "
            f"{self.num_queries} query tokens once, got {covered}",
        )
        inside = (self.start >= 0) & (self.start <= self.end) & (self.end <= self.num_keys)
        rule = f"start and end must be ranges of slots within the {self.num_keys} keys"
        require_values({f"{rule}: make them of the same batch": inside.all()}, rule)
        # On a GPU, this check would cost ten launches per query range.
        if self.start.device.type == "cpu":
            rule = "query_ranges must cover all that their queries see"
            fix = f"{rule}: widen position, lookback or slack"
            for query_range in self.query_ranges:
                require_values({fix: query_range.covers(self.start, self.end)}, rule)

    @property
    def packed(self) -> bool:
        return self.real is not None

    @property
    def all_tokens(self) -> Layout:
        return self if self.global_layout is None else self.global_layout

    @property
    def num_shards(self) -> int:
        return self.all_tokens.num_queries // max(self.num_queries, 1)

    def derive(self, key, make: Callable) -> Any:
        """Return ``make()``, cached by ``key`` for all layers of a microbatch."""
        if key in self.derived:
            return self.derived[key]
        with torch.inference_mode(False):
            made = make()
        # Captured tensors have no content before the CUDA graph's first replay.
        if self.in_graph or not capturing():
            self.derived[key] = made
        return made

    def derive_large(self, key, make: Callable) -> Any:
        """Return ``make()``, cached only for the last two layouts.

        Layouts of unpacked batches are themselves cached, so large tensors would accumulate.
        """
        if key in self.derived and _recent and _recent[-1]() is self and not capturing():
            return self.derived[key]
        others = [x for ref in _recent if (x := ref()) is not None and x is not self]
        for layout in others[:-1]:
            for old in layout.large:
                layout.derived.pop(old, None)
            layout.large.clear()
        _recent[:] = map(weakref.ref, (*others[-1:], self))
        if capturing():  # every graph replay reads the tensor, so keep it
            self.large.discard(key)
        elif key not in self.derived:
            self.large.add(key)
        return self.derive(key, make)

    def real_tokens(self) -> torch.Tensor | int:
        """Count tokens on all ranks without padding; return an int if not :attr:`packed`."""
        whole = self.all_tokens
        if (real := whole.real) is None:
            return whole.num_queries
        return whole.derive("real tokens", real.sum)

    def keys_in_slot_order(self, keys: torch.Tensor) -> torch.Tensor:
        """Return ``keys [num_keys, ...]`` in slot order."""
        return keys if self.key_indices is None else keys.index_select(0, self.key_indices)

    def slots_of_keys(self) -> torch.Tensor:
        def slots() -> torch.Tensor:
            slots = torch.arange(self.num_keys, device=self.start.device)
            if self.key_indices is None:
                return slots
            return torch.empty_like(slots).index_copy_(0, self.key_indices, slots)

        return self.derive("slots", slots)

    def to_key_indices(self, slots: torch.Tensor) -> torch.Tensor:
        if self.key_indices is None:
            return slots
        indices = self.key_indices[slots.clamp_min(0).long()].to(slots.dtype)
        return torch.where(slots < 0, slots, indices)

    def blocks(
        self, tokens_for_width: Callable[[int], int], cut: int | None = None
    ) -> Iterator[Block]:
        """Cut the query ranges into blocks of queries, skipping slots above the diagonal.

        Args:
            tokens_for_width: maps a number of visible slots to the maximum queries of a block.
            cut: a block also ends where :meth:`QueryRange.bound` reaches this number.
        """
        for query_range in self.query_ranges:
            total, begin, before_cut = len(query_range), 0, 0
            if cut is not None:
                before_cut = bisect_left(range(total), cut, key=query_range.bound)
            while begin < total:
                most = (before_cut if begin < before_cut else total) - begin
                lo, hi = query_range.slots(begin, begin + 1)
                most = max(1, min(most, tokens_for_width(hi - lo)))
                lo, hi = query_range.slots(begin, begin + most)
                end = begin + max(1, min(most, tokens_for_width(hi - lo)))
                lo, hi = query_range.slots(begin, end)
                tokens = query_range.tokens_of(begin, end)
                yield Block(tokens, lo, hi, query_range.ratio, query_range.bound(begin))
                begin = end

    def widest(self, tokens: slice) -> int:
        """Return a bound of the slots visible to any query in the slice ``tokens`` of step 1."""
        bound = 0
        for query_range in self.query_ranges:
            first, step = query_range.tokens.start, query_range.tokens.step
            last = min(tokens.stop, query_range.tokens.stop) - 1
            if last >= max(first, tokens.start):
                query = (last - first) // step
                lo, hi = query_range.slots(query, query + 1)
                bound = max(bound, hi - lo)
        return min(bound, self.max_length)

    def seen(self, block: Block) -> Seen:
        def columns() -> Seen:
            start, end = self.start[block.tokens] - block.lo, self.end[block.tokens] - block.lo
            return Seen(start.clamp_(0, block.width), end.clamp_(0, block.width))

        return self.derive(("seen", *block.key), columns)


_recent: list[weakref.ref[Layout]] = []


@tensor_cache(16)
def bshd_layout(seq_length: int, batch: int, device: torch.device) -> Layout:
    """Return the layout of ``batch`` causal sequences of equal length, ``[s, b, ...]``."""
    count = seq_length * batch
    token = torch.arange(count, device=device)
    position, start = token // batch, token % batch * seq_length
    return Layout(
        num_queries=count,
        num_keys=count,
        start=start.int(),
        end=(start + position + 1).int(),
        position=position,
        key_indices=None if batch == 1 else token % seq_length * batch + token // seq_length,
        real=None,
        query_ranges=tuple(
            QueryRange(slice(b, count, batch), b * seq_length, 0, seq_length, count)
            for b in range(batch)
        ),
        max_length=seq_length,
        sequences=Sequences(batch),
    )


def packed_layout(
    cu_seqlens: torch.Tensor,
    tokens: int,
    max_seqlen: int | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> Layout:
    """Return the layout of packed sequences (THD), which begin at ``cu_seqlens[i]``.

    Args:
        cu_seqlens: int ``[n + 1]``, cumulative *real* lengths, from 0 on.
        tokens: length of the packed tensor.
        max_seqlen: host-side upper bound of a real length, or ``None``.
        cu_seqlens_padded: int ``[n + 1]``, cumulative lengths with padding, if any; tokens after
            the last are also padding.

    Raises:
        ConfigError: lengths do not fit ``tokens`` or exceed ``max_seqlen``; a device assert on a
            GPU at its next synchronisation.
    """
    require(
        max_seqlen is None or (isinstance(max_seqlen, int) and max_seqlen >= 0),
        f"max_seqlen must be an int on the host, at least 0, or None, got {max_seqlen!r}: pass the "
        "longest length, or None",
    )
    require_cu_seqlens(cu_seqlens, cu_seqlens_padded, tokens, max_seqlen)
    padded = None if cu_seqlens_padded is None else cu_seqlens_padded.int()
    offsets = (cu_seqlens if padded is None else padded).long()
    token = torch.arange(tokens, device=offsets.device)
    # With right=True, empty sequences get no token.
    sequence = torch.bucketize(token, offsets[1:], right=True)
    inside = sequence < offsets.numel() - 1
    sequence = sequence.clamp_max(max(offsets.numel() - 2, 0))
    start = offsets[sequence]
    position = token - start
    real = inside & (position < cu_seqlens.long().diff()[sequence])
    end = torch.where(real, token + 1, start)
    max_length = tokens if max_seqlen is None else min(max_seqlen, tokens)
    return Layout(
        num_queries=tokens,
        num_keys=tokens,
        start=start.int(),
        end=end.int(),
        # Positions of padding must be inside the rope table.
        position=torch.where(inside, position, 0).clamp_max(max(max_length - 1, 0)),
        key_indices=None,
        real=real,
        query_ranges=(QueryRange(slice(0, tokens, 1), 0, 0, max_length, tokens),),
        max_length=max_length,
        sequences=Sequences(1, cu_seqlens.int(), padded),
    )
