"""Packed tokens that are cut without regard to sequences.

A rank holds *runs* of neighbouring global positions of the packed tokens. A sequence may begin and
end anywhere in them. Two facts keep the work small: local tokens are in the order of global
positions, so a rank's tokens of a sequence are neighbours also across its runs; and at most one
sequence goes on from keys before a run into that run, the one that holds the run's first position.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

from megatron_dsa.ops.dense_attention.ring.shards import PackedShard, Part, local_part
from megatron_dsa.ops.dense_attention.sequences import Packed, covering


@dataclass(frozen=True, eq=False)
class PackedRuns(PackedShard):
    """Runs of neighbouring global positions.

    ``max_seqlen`` bounds real lengths: keys of a block that lie further away are left out, and
    whole blocks as well.

    Attributes:
        runs: of every rank its pairs ``(first position, length)``, in order.
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
        # How much padding follows a sequence is on the device.
        return local_part(
            covering(
                [(real, real), (end, real), (end, end)], self.tokens, self.tokens, self.max_seqlen
            )
        )

    def _of_another(self, source: int) -> Iterator[Part]:
        """Yield a part per group of local runs that have the same keys before them."""

        def keys_before(run: tuple[int, int]) -> int:
            return self._before(source, run[0])

        for keys, group in groupby(self.runs[self.rank], keys_before):
            runs = list(group)
            (first, _), (last, length) = runs[0], runs[-1]
            part = self._part(source, first, last + length, keys)
            if part is not None:
                yield part

    def _part(self, source: int, first: int, end: int, seen: int) -> Part | None:
        """Return the work of local tokens at ``[first, end)`` on another rank's first ``seen``."""
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
        # Keys that no query sees, then the sequence's, then queries that see nothing.
        none = torch.zeros_like(busy)
        cu_q = torch.stack([none, none, busy.clamp_max(counts[0]), none + counts[0]])
        cu_k = torch.stack([none, idle.clamp(0, counts[1]), none + counts[1], none + counts[1]])
        return Part(queries, keys, False, Packed(cu_q.int(), cu_k.int(), max(counts)))

    def _sequences(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int32 ``[sequences]`` positions: first, real end, end with padding."""
        start, end = self.offsets[:-1], self.offsets[1:]
        return start, torch.minimum(start + self.cu_seqlens.diff(), end), end

    def _before(self, rank: int, position):
        """Count the tokens of a rank before a global position, an int or a tensor of them."""
        tokens = 0
        for first, length in self.runs[rank]:
            inside = position - first
            if isinstance(position, torch.Tensor):
                tokens = tokens + inside.clamp(0, length)
            else:
                tokens += min(max(inside, 0), length)
        return tokens
