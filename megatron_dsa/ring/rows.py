"""The rows of a context-parallel rank, and what they see of another rank's rows.

A sequence is cut into ``2 * cp`` chunks and rank ``r`` holds chunks ``r`` and ``2 * cp - 1 - r`` in
this order (zigzag). So a rank's own rows are causal in their local order; of a rank before it all
its rows see the first chunk and nothing else; and of a rank after it the rows of its second chunk
see everything. All three are the same amount of work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ring.sequences import Dense, Packed

_ALL = slice(None)


@dataclass(frozen=True)
class Part:
    """One rank's work on the block of another.

    Attributes:
        queries: the local query rows that take part; keys: the rows of the block that do.
        causal: whether a query sees the keys up to its own place in the sequence only.
        sequences: which of these queries see which of these keys.
    """

    queries: slice
    keys: slice
    causal: bool
    sequences: Dense | Packed


def _check_rank(cp: int, rank: int) -> None:
    if not 0 <= rank < cp:
        raise ConfigError(
            f"rank must be the rank within the context-parallel group, 0 to {cp - 1}, got {rank}; "
            "pass parallel_state.get_context_parallel_rank()."
        )


@dataclass(frozen=True)
class ZigzagRows:
    """Rows ``s * batch + b`` of Megatron's ``[s_local, b, ...]``: ``batch`` causal sequences.

    Attributes:
        cp, rank: context-parallel ranks, and which of them this is.
        batch: sequences.
        length: positions of a sequence on this rank (``s_local``, the full length over ``cp``).

    Raises:
        ConfigError: the length cannot be two chunks, or there is no such rank.
    """

    cp: int
    rank: int
    batch: int
    length: int

    def __post_init__(self):
        _check_rank(self.cp, self.rank)
        if self.cp > 1 and self.length % 2:
            raise ConfigError(
                f"length must be even, a rank holds two chunks of a sequence, got {self.length}; "
                f"pad sequences to a multiple of 2 * cp = {2 * self.cp}."
            )

    packed = False

    @property
    def rows(self) -> int:
        return self.length * self.batch

    def part(self, source: int) -> Part:
        """Return what this rank does with the block of rank ``source``."""
        dense, half = Dense(self.batch), self.rows // 2
        if source == self.rank:
            return Part(_ALL, _ALL, True, dense)
        if source < self.rank:
            return Part(_ALL, slice(0, half), False, dense)
        return Part(slice(half, None), _ALL, False, dense)


@dataclass(frozen=True, eq=False)
class PackedZigzagRows:
    """Rows of packed sequences, every sequence cut into its own ``2 * cp`` chunks.

    Sequence ``k`` has the local rows ``[padded[k] / cp, padded[k + 1] / cp)``. Rows past its real
    length, and rows after the last sequence, see nothing and are seen by nobody. Nothing here asks
    the device for a number. Parts are built once, so the layers of a microbatch should share it.

    Attributes:
        cp, rank: context-parallel ranks, and which of them this is.
        rows: local rows of the packed tensors.
        cu_seqlens: int32 ``[sequences + 1]`` on the device, cumulative real lengths of the whole
            sequences.
        max_seqlen: host-side upper bound of a whole sequence's length; of its padded length, where
            that is not just the next multiple of ``2 * cp``. Rows beyond it are not computed.
        cu_seqlens_padded: the same with padding, multiples of ``2 * cp``; ``None`` if sequences
            have none.

    Raises:
        ConfigError: there is no such rank, or a bound or tensor is not as above.
    """

    cp: int
    rank: int
    rows: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    cu_seqlens_padded: torch.Tensor | None = None
    derived: dict = field(default_factory=dict, repr=False)

    packed = True

    def __post_init__(self):
        _check_rank(self.cp, self.rank)
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            given = getattr(self, name)
            if given is None:
                continue
            if given.dim() != 1 or given.numel() < 2 or given.dtype != torch.int32:
                raise ConfigError(
                    f"{name} must be an int32 tensor [sequences + 1] with at least one sequence, "
                    f"got {given.dtype} {list(given.shape)}; pass that of packed_seq_params."
                )
        if not isinstance(self.max_seqlen, int) or self.max_seqlen < 1:
            raise ConfigError(
                "max_seqlen must be a positive int on the host (a tensor would have to be waited "
                f"for), got {self.max_seqlen!r}; pass the longest length or the row count."
            )

    def part(self, source: int) -> Part:
        """Return what this rank does with the block of rank ``source``."""
        # Without padding all earlier ranks look the same, and so do all later ones.
        key = source if self.cu_seqlens_padded is not None else _order(source, self.rank)
        if key not in self.derived:
            self.derived[key] = Part(_ALL, _ALL, source == self.rank, self._segments(source))
        return self.derived[key]

    def _segments(self, source: int) -> Packed:
        padded = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        bounds = padded // self.cp
        start, end = bounds[:-1], bounds[1:]
        # Pairs of ends, of queries and of keys, in ascending order within a sequence.
        ends = self._ends(source, start, end)
        # A bound for real lengths is one for padded lengths after rounding up.
        longest = -(-self.max_seqlen // (2 * self.cp)) * 2
        longest = max(1, min(longest, self.rows))
        tail = torch.arange(1, -(-self.rows // longest) + 1, device=bounds.device) * longest
        tail = (end[-1] + tail).clamp_max(self.rows)
        queries_then_keys = (
            (tail, end[-1].expand_as(tail)),
            (torch.full_like(tail, self.rows), tail),
        )
        cu = []
        for side in (0, 1):
            inside = torch.stack([pair[side] for pair in ends], dim=1).flatten()
            after = [pair[side] for pair in queries_then_keys]
            cu.append(torch.cat([bounds[:1], inside, *after]).int())
        return Packed(*cu, longest)

    def _ends(self, source: int, start, end) -> list[tuple[torch.Tensor, torch.Tensor]]:
        middle = start + (end - start) // 2
        if self.cu_seqlens_padded is None:
            if source == self.rank:
                return [(end, end)]
            if source < self.rank:
                return [(end, middle), (end, end)]
            return [(middle, start), (end, end)]
        if source > self.rank:
            # Where the second chunk has a real row, all chunks before it are full.
            queries = middle + self._real(start, end, 2 * self.cp - 1 - self.rank)
            keys = start + self._real_rows(start, end, source)
            return [(middle, start), (queries, keys), (end, keys), (end, end)]
        queries = start + self._real_rows(start, end, self.rank)
        keys = queries if source == self.rank else start + self._real(start, end, source)
        return [(queries, keys), (end, keys), (end, end)]

    def _real(self, start, end, chunk: int) -> torch.Tensor:
        """Real rows of a chunk, per sequence."""
        size = (end - start) // 2
        return torch.minimum((self.cu_seqlens.diff() - chunk * size).clamp_min(0), size)

    def _real_rows(self, start, end, rank: int) -> torch.Tensor:
        """Real rows of a rank, per sequence; they come first."""
        if self.cp == 1:
            return torch.minimum(self.cu_seqlens.diff(), end - start)
        return self._real(start, end, rank) + self._real(start, end, 2 * self.cp - 1 - rank)


def _order(source: int, rank: int) -> str:
    return "own" if source == rank else "before" if source < rank else "after"
