"""Packed tokens that are cut without regard to sequences.

A rank holds *runs* of neighbouring global positions of the packed tokens. A sequence may begin and
end anywhere in them. Two facts keep the work small: local tokens are in the order of
    global_positions, so what a rank has of
a sequence are neighbouring tokens also across its runs; and of the sequences at most one goes on
from keys before a run into that run, the one that holds the run's first place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dense_attention.ring.shards import PackedShard, Part, own_part
from megatron_dsa.ops.dense_attention.sequences import Packed, covering


@dataclass(frozen=True, eq=False)
class PackedRuns(PackedShard):
    """Runs of neighbouring global positions, whatever sequences they belong to; these have any
    length.

    ``max_seqlen`` bounds real lengths: keys of a block that lie further away are left out, and
    blocks that do altogether, too.

    Attributes:
        runs: of every rank its pairs ``(first place, length)``, in the order of global positions.

    Raises:
        ConfigError: ``runs`` are not those of ``cp`` ranks with ``rows`` rows each.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...] = field(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        held = [sum(length for _, length in runs) for runs in self.runs]
        if held != [self.tokens] * self.cp:
            raise ConfigError(
                f"runs must be those of {self.cp} ranks, {self.tokens} rows each, got {held} rows; "
                "pass Sharding.chunks of every context-parallel rank."
            )

    def parts(self, source: int) -> tuple[Part, ...]:
        """See :meth:`TokenShard.parts`."""
        make = self._own if source == self.rank else lambda: tuple(self._of_another(source))
        return self._once(source, make)

    def _own(self) -> tuple[Part, ...]:
        _, real, end = (
            self._rows_before(self.rank, global_positions) for global_positions in self._sequences()
        )
        if self.cu_seqlens_padded is None:
            return own_part(covering([(end, end)], self.tokens, self.max_seqlen))
        # How much padding follows a sequence is on the device.
        return own_part(
            covering(
                [(real, real), (end, real), (end, end)], self.tokens, self.tokens, self.max_seqlen
            )
        )

    def _of_another(self, source: int) -> Iterator[Part]:
        """Yield a part per group of own runs that have the same keys before them."""

        def keys_before(run: tuple[int, int]) -> int:
            return self._rows_before(source, run[0])

        for keys, group in groupby(self.runs[self.rank], keys_before):
            runs = list(group)
            (first, _), (last, length) = runs[0], runs[-1]
            part = self._part(source, first, last + length, keys)
            if part is not None:
                yield part

    def _part(self, source: int, first: int, end: int, seen: int) -> Part | None:
        """Return what own tokens at ``[first, end)`` do with the first ``seen`` of another rank."""
        reach = self.max_seqlen - 1
        keys = slice(self._rows_before(source, first - reach), seen)
        if keys.start == keys.stop:
            return None
        nearest = max(place + length for place, length in self.runs[source] if place < first)
        queries = slice(
            self._rows_before(self.rank, first),
            self._rows_before(self.rank, min(end, nearest + reach)),
        )
        start, real, _ = self._sequences()
        holds_first = (start <= first) & (first < real)
        last_query = torch.where(holds_first, real, first).amax()
        first_key = torch.where(holds_first, start, first).amin()
        counts = queries.stop - queries.start, keys.stop - keys.start
        busy = self._rows_before(self.rank, last_query) - queries.start
        idle = self._rows_before(source, first_key) - keys.start
        # Keys that no query sees, then the sequence's, then queries that see nothing.
        none = torch.zeros_like(busy)
        cu_q = torch.stack([none, none, busy.clamp_max(counts[0]), none + counts[0]])
        cu_k = torch.stack([none, idle.clamp(0, counts[1]), none + counts[1], none + counts[1]])
        return Part(queries, keys, False, Packed(cu_q.int(), cu_k.int(), max(counts)))

    def _sequences(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int32 ``[sequences]`` positions: first, real end, end with padding."""
        start, end = self.offsets[:-1], self.offsets[1:]
        return start, torch.minimum(start + self.cu_seqlens.diff(), end), end

    def _rows_before(self, rank: int, place):
        """How many tokens of a rank lie before a place: an int, or a tensor of global positions."""
        rows = 0
        for first, length in self.runs[rank]:
            inside = place - first
            if isinstance(place, torch.Tensor):
                rows = rows + inside.clamp(0, length)
            else:
                rows += min(max(inside, 0), length)
        return rows
