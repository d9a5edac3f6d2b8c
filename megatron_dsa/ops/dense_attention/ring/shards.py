"""Tokens of a context-parallel rank, and their visible keys on other ranks.

Zigzag: rank ``r`` holds chunks ``r`` and ``2 * cp - 1 - r`` of ``2 * cp`` per sequence. All its
tokens attend to the first chunk of an earlier rank, and its second chunk to both chunks of a later
rank, so all ranks have equal work. Contiguous: rank ``r`` holds the ``r``-th of ``cp`` parts.

Local tokens are in sequence order, so attention within a rank is plain causal attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch

from megatron_dsa.ops.common.checks import require_values
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed, covering

_ALL = slice(None)


@dataclass(frozen=True)
class Part:
    queries: slice
    keys: slice
    causal: bool
    sequences: Dense | Packed


class TokenShard(Protocol):
    @property
    def cp(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def packed(self) -> bool: ...

    def parts(self, source: int) -> tuple[Part, ...]:
        """Return parts for the keys of rank ``source``; the first local part has all tokens."""


def local_part(sequences: Dense | Packed) -> tuple[Part, ...]:
    return (Part(_ALL, _ALL, True, sequences),)


@dataclass(frozen=True)
class UnpackedShard:
    """Tokens ``s * batch + b`` of ``batch`` sequences with ``length`` local positions each."""

    cp: int
    rank: int
    batch: int
    length: int

    packed = False

    @property
    def tokens(self) -> int:
        return self.length * self.batch


class ZigzagShard(UnpackedShard):
    def parts(self, source: int) -> tuple[Part, ...]:
        dense, half = Dense(self.batch), self.tokens // 2
        if source == self.rank:
            return local_part(dense)
        if source < self.rank:
            return (Part(_ALL, slice(0, half), False, dense),)
        return (Part(slice(half, None), _ALL, False, dense),)


class ContiguousShard(UnpackedShard):
    def parts(self, source: int) -> tuple[Part, ...]:
        if source == self.rank:
            return local_part(Dense(self.batch))
        return (Part(_ALL, _ALL, False, Dense(self.batch)),) if source < self.rank else ()


@dataclass(frozen=True, eq=False)
class PackedShard:
    """Tokens of packed sequences; no method synchronises with the device.

    Padding tokens neither attend nor are attended to.

    Attributes:
        cu_seqlens, cu_seqlens_padded: int32 ``[sequences + 1]`` on the device, lengths over all
            ranks; the latter is ``None`` without padding.
        max_seqlen: host-side upper bound of these lengths.
    """

    cp: int
    rank: int
    tokens: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    cu_seqlens_padded: torch.Tensor | None = None
    derived: dict = field(default_factory=dict, repr=False)

    packed = True

    @property
    def offsets(self) -> torch.Tensor:
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    @torch.inference_mode(False)
    def _once(self, key, make: Callable[[], tuple[Part, ...]]) -> tuple[Part, ...]:
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]


@dataclass(frozen=True, eq=False)
class PackedZigzagShard(PackedShard):
    """Two chunks of every sequence, whose padded length is a multiple of ``2 * cp``.

    Sequence ``k`` has the local tokens ``[padded[k] / cp, padded[k + 1] / cp)``. ``max_seqlen``
    also bounds lengths padded beyond the next multiple of ``2 * cp``.
    """

    def __post_init__(self):
        if self.cp > 1:
            chunks = 2 * self.cp
            rule = f"lengths with padding must be multiples of 2 * cp = {chunks}: pad the sequences"
            require_values({rule: (self.offsets.diff() % chunks == 0).all()}, rule)

    def parts(self, source: int) -> tuple[Part, ...]:
        # Without padding, parts depend only on whether the source rank is earlier or later.
        key = source if self.cu_seqlens_padded is not None else _order(source, self.rank)
        return self._once(key, lambda: self._parts(source))

    def _parts(self, source: int) -> tuple[Part, ...]:
        bounds = self.offsets // self.cp
        # Rounding up turns a bound of real lengths into one of padded lengths.
        longest = -(-self.max_seqlen // (2 * self.cp)) * 2
        sequences = covering(self._ends(source, bounds[:-1], bounds[1:]), self.tokens, longest)
        return (Part(_ALL, _ALL, source == self.rank, sequences),)

    def _ends(self, source: int, start, end) -> list[tuple[torch.Tensor, torch.Tensor]]:
        middle = start + (end - start) // 2
        if self.cu_seqlens_padded is None:
            if source == self.rank:
                return [(end, end)]
            if source < self.rank:
                return [(end, middle), (end, end)]
            return [(middle, start), (end, end)]
        if source > self.rank:
            # If the second chunk has a real token, all chunks before it are full.
            queries = middle + self._real(start, end, 2 * self.cp - 1 - self.rank)
            keys = start + self._real_of_rank(start, end, source)
            return [(middle, start), (queries, keys), (end, keys), (end, end)]
        queries = start + self._real_of_rank(start, end, self.rank)
        keys = queries if source == self.rank else start + self._real(start, end, source)
        return [(queries, keys), (end, keys), (end, end)]

    def _real(self, start, end, chunk: int) -> torch.Tensor:
        size = (end - start) // 2
        return torch.minimum((self.cu_seqlens.diff() - chunk * size).clamp_min(0), size)

    def _real_of_rank(self, start, end, rank: int) -> torch.Tensor:
        if self.cp == 1:
            return torch.minimum(self.cu_seqlens.diff(), end - start)
        return self._real(start, end, rank) + self._real(start, end, 2 * self.cp - 1 - rank)


def _order(source: int, rank: int) -> str:
    return "local" if source == rank else "before" if source < rank else "after"


@dataclass(frozen=True, eq=False)
class PackedRuns(PackedShard):
    """Runs of consecutive global positions that ignore sequence boundaries.

    Only the sequence at a run's first position has keys before that run. Keys at a distance of
    ``max_seqlen`` real tokens or more are skipped.

    Attributes:
        runs: pairs ``(first position, length)`` per rank, in order.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...] = field(kw_only=True)

    def parts(self, source: int) -> tuple[Part, ...]:
        make = self._local if source == self.rank else lambda: tuple(self._of_another(source))
        return self._once(source, make)

    def _local(self) -> tuple[Part, ...]:
        _, real, end = (
            self._before(self.rank, global_positions) for global_positions in self._sequences()
        )
        if self.cu_seqlens_padded is None:
            return local_part(covering([(end, end)], self.tokens, self.max_seqlen))
        return local_part(
            covering(
                [(real, real), (end, real), (end, end)], self.tokens, self.tokens, self.max_seqlen
            )
        )

    def _of_another(self, source: int) -> Iterator[Part]:
        def keys_before(run: tuple[int, int]) -> int:
            return self._before(source, run[0])

        for keys, group in groupby(self.runs[self.rank], keys_before):
            runs = list(group)
            (first, _), (last, length) = runs[0], runs[-1]
            part = self._part(source, first, last + length, keys)
            if part is not None:
                yield part

    def _part(self, source: int, first: int, end: int, seen: int) -> Part | None:
        reach = self.max_seqlen - 1
        keys = slice(self._before(source, first - reach), seen)
        if keys.start == keys.stop:
            return None
        nearest = max(start + length for start, length in self.runs[source] if start < first)
        queries = slice(
            self._before(self.rank, first),
            self._before(self.rank, min(end, nearest + reach)),
        )
        start, real, _ = self._sequences()
        holds_first = (start <= first) & (first < real)
        last_query = torch.where(holds_first, real, first).amax()
        first_key = torch.where(holds_first, start, first).amin()
        counts = queries.stop - queries.start, keys.stop - keys.start
        busy = self._before(self.rank, last_query) - queries.start
        idle = self._before(source, first_key) - keys.start
        # Three segments: unseen keys, the sequence, queries without keys.
        none = torch.zeros_like(busy)
        cu_q = torch.stack([none, none, busy.clamp_max(counts[0]), none + counts[0]])
        cu_k = torch.stack([none, idle.clamp(0, counts[1]), none + counts[1], none + counts[1]])
        return Part(queries, keys, False, Packed(cu_q.int(), cu_k.int(), max(counts)))

    def _sequences(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return per sequence its first position, real end and end with padding, int32."""
        start, end = self.offsets[:-1], self.offsets[1:]
        return start, torch.minimum(start + self.cu_seqlens.diff(), end), end

    def _before(self, rank: int, position):
        tokens = 0
        for first, length in self.runs[rank]:
            inside = position - first
            if isinstance(position, torch.Tensor):
                tokens = tokens + inside.clamp(0, length)
            else:
                tokens += min(max(inside, 0), length)
        return tokens
