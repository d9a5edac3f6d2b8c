"""The tokens of a context-parallel rank, and what they see of another rank's tokens.

Zigzag: a sequence is cut into ``2 * cp`` chunks and rank ``r`` holds chunks ``r`` and
``2 * cp - 1 - r`` in this order. So of a rank before it all its tokens see the first chunk and
nothing else, and of a rank after it the tokens of its second chunk see everything: the same amount
    of
work for all. Contiguous: rank ``r`` holds the ``r``-th of ``cp`` parts; it sees everything of a
rank before it and nothing of a rank after it.

Local tokens are always in the order of the sequence. So a rank's own tokens are causal in their
local
order: its own block is one part, of all its tokens. Packed tokens that are cut without regard to
sequences are in :mod:`megatron_dsa.ops.dense_attention.ring.runs`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.checks import require_cu_seqlens, require_values
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed, covering

_ALL = slice(None)


@dataclass(frozen=True)
class Part:
    """Work of one rank on the block of another.

    Attributes:
        queries: the local query tokens that take part; keys: the rows of the block that do.
        causal: whether a query sees the keys up to its own place in the sequence only.
        sequences: which of these queries see which of these keys.
    """

    queries: slice
    keys: slice
    causal: bool
    sequences: Dense | Packed


class TokenShard(Protocol):
    """What attention over ranks asks of a rank's tokens.

    Attributes:
        cp, rank: context-parallel ranks, and which of them this is.
        tokens: how many there are on this rank.
        packed: whether they are of packed sequences.
    """

    @property
    def cp(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def packed(self) -> bool: ...

    def parts(self, source: int) -> tuple[Part, ...]:
        """Return what this rank does with the block of rank ``source``; empty for nothing.

        The first part of the own block has all tokens, as queries and as keys.
        """


def own_part(sequences: Dense | Packed) -> tuple[Part, ...]:
    """Return what any rank does with its own block."""
    return (Part(_ALL, _ALL, True, sequences),)


def _check_rank(cp: int, rank: int) -> None:
    if not 0 <= rank < cp:
        raise ConfigError(
            f"rank must be the rank within the context-parallel group, 0 to {cp - 1}, got {rank}; "
            "pass parallel_state.get_context_parallel_rank()."
        )


@dataclass(frozen=True)
class UnpackedShard:
    """Tokens ``s * batch + b`` of Megatron's ``[s_local, b, ...]``: ``batch`` causal sequences.

    Attributes:
        cp, rank: context-parallel ranks, and which of them this is.
        batch: sequences.
        length: positions of a sequence on this rank (``s_local``, the full length over ``cp``).

    Raises:
        ConfigError: there is no such rank.
    """

    cp: int
    rank: int
    batch: int
    length: int

    packed = False

    def __post_init__(self):
        _check_rank(self.cp, self.rank)

    @property
    def tokens(self) -> int:
        return self.length * self.batch


class ZigzagShard(UnpackedShard):
    """Two chunks of every sequence.

    Raises:
        ConfigError: the length cannot be two chunks.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.cp > 1 and self.length % 2:
            raise ConfigError(
                f"length must be even, a rank holds two chunks of a sequence, got {self.length}; "
                f"pad sequences to a multiple of 2 * cp = {2 * self.cp}."
            )

    def parts(self, source: int) -> tuple[Part, ...]:
        """See :meth:`TokenShard.parts`."""
        dense, half = Dense(self.batch), self.tokens // 2
        if source == self.rank:
            return own_part(dense)
        if source < self.rank:
            return (Part(_ALL, slice(0, half), False, dense),)
        return (Part(slice(half, None), _ALL, False, dense),)


class ContiguousShard(UnpackedShard):
    """One part of every sequence."""

    def parts(self, source: int) -> tuple[Part, ...]:
        """See :meth:`TokenShard.parts`."""
        if source == self.rank:
            return own_part(Dense(self.batch))
        return (Part(_ALL, _ALL, False, Dense(self.batch)),) if source < self.rank else ()


@dataclass(frozen=True, eq=False)
class PackedShard:
    """Tokens of packed sequences.

    Tokens past a sequence's real length, and tokens after the last sequence, see nothing and no
    query sees them. Nothing here asks the device for a number. Parts are built once, so the layers
    of a microbatch should share it.

    Attributes:
        cp, rank: context-parallel ranks, and which of them this is.
        tokens: local tokens of the packed tensors.
        cu_seqlens: int32 ``[sequences + 1]`` on the device, cumulative real lengths of the whole
            sequences.
        max_seqlen: host-side upper bound of a whole sequence's length, see the classes.
        cu_seqlens_padded: the same with padding; ``None`` if sequences have none.

    Raises:
        ConfigError: there is no such rank, or a bound or tensor is not as above. For the values of
            tensors on a GPU an assertion there fails, at its next synchronisation.
    """

    cp: int
    rank: int
    tokens: int
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
        total = self.cp * self.tokens
        require_cu_seqlens(self.cu_seqlens, self.cu_seqlens_padded, total, self.max_seqlen)

    @property
    def offsets(self) -> torch.Tensor:
        """Where sequences begin, and where the last one ends with its padding."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    @torch.inference_mode(False)  # what is formed in evaluation is used in training, too
    def _once(self, key, make: Callable[[], tuple[Part, ...]]) -> tuple[Part, ...]:
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]


class PackedZigzagShard(PackedShard):
    """Two chunks of every sequence, whose padded length is a multiple of ``2 * cp``.

    Sequence ``k`` has the local rows ``[padded[k] / cp, padded[k + 1] / cp)``. ``max_seqlen``
    bounds its padded length where that is not just the next multiple of ``2 * cp``: rows beyond it
    are not computed.
    """

    def __post_init__(self):
        super().__post_init__()
        chunks, lengths = 2 * self.cp, self.offsets.diff()
        longest = -(-self.max_seqlen // chunks) * chunks
        rule = (
            f"max_seqlen must be at least the longest sequence with its padding, got "
            f"{self.max_seqlen}: pass that length or the row count of all ranks"
        )
        rules = {rule: lengths.amax() <= longest}
        if self.cp > 1:
            multiple = f"lengths with padding must be multiples of 2 * cp = {chunks}"
            rules[f"{multiple}: pad the sequences"] = (lengths % chunks == 0).all()
        require_values(rules, " or ".join(rules))

    def parts(self, source: int) -> tuple[Part, ...]:
        """See :meth:`TokenShard.parts`."""
        # Without padding all earlier ranks look the same, and so do all later ones.
        key = source if self.cu_seqlens_padded is not None else _order(source, self.rank)
        return self._once(key, lambda: self._parts(source))

    def _parts(self, source: int) -> tuple[Part, ...]:
        bounds = self.offsets // self.cp
        # A bound for real lengths is one for padded lengths after rounding up.
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
            # Where the second chunk has a real token, all chunks before it are full.
            queries = middle + self._real(start, end, 2 * self.cp - 1 - self.rank)
            keys = start + self._real_rows(start, end, source)
            return [(middle, start), (queries, keys), (end, keys), (end, end)]
        queries = start + self._real_rows(start, end, self.rank)
        keys = queries if source == self.rank else start + self._real(start, end, source)
        return [(queries, keys), (end, keys), (end, end)]

    def _real(self, start, end, chunk: int) -> torch.Tensor:
        """Real tokens of a chunk, per sequence."""
        size = (end - start) // 2
        return torch.minimum((self.cu_seqlens.diff() - chunk * size).clamp_min(0), size)

    def _real_rows(self, start, end, rank: int) -> torch.Tensor:
        """Real tokens of a rank, per sequence; they come first."""
        if self.cp == 1:
            return torch.minimum(self.cu_seqlens.diff(), end - start)
        return self._real(start, end, rank) + self._real(start, end, 2 * self.cp - 1 - rank)


def _order(source: int, rank: int) -> str:
    return "own" if source == rank else "before" if source < rank else "after"
