"""Sharding of a microbatch's tokens over ranks, and the layout of one rank.

A *global position* is an index into dim 0 of Megatron's unsharded ``[s, b, ...]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.capture import tensor_cache
from megatron_dsa.ops.common.checks import require_tensor
from megatron_dsa.ops.layout.layout import Layout, QueryRange

#: Tokens of context-parallel rank ``r``. ``zigzag``: chunks ``r`` and ``2 * cp - 1 - r`` of ``2 *
#: cp`` per document; ``zigzag_rows``: the same chunks of the whole packed batch; ``contiguous``:
#: the ``r``-th of ``cp`` equal parts.
CPLayout = Literal["zigzag", "zigzag_rows", "contiguous"]
CP_LAYOUTS = get_args(CPLayout)


@dataclass(frozen=True)
class Sharding:
    """Sharding over ``cp`` context-parallel ranks, then over ``sp`` sequence-parallel ranks."""

    cp: int = 1
    cp_rank: int = 0
    cp_layout: CPLayout = "zigzag"
    sp: int = 1
    sp_rank: int = 0

    def __post_init__(self):
        for name, rank, size in (
            ("cp_rank", self.cp_rank, self.cp),
            ("sp_rank", self.sp_rank, self.sp),
        ):
            require(
                0 <= rank < size,
                f"{name} must be from 0 to {size - 1}, got {rank}: pass the rank within its group",
            )
        require(
            self.cp_layout in CP_LAYOUTS,
            f"cp_layout must be one of {', '.join(CP_LAYOUTS)}, got {self.cp_layout!r}: pass "
            "--dsa-cp-layout",
        )

    @cached_property
    def ranks(self) -> int:
        return self.cp * self.sp

    @property
    def rank(self) -> int:
        """Rank over ``cp`` and ``sp``; sequence-parallel ranks are consecutive."""
        return self.cp_rank * self.sp + self.sp_rank

    def whole(self) -> Sharding:
        return dataclasses.replace(self, sp=1, sp_rank=0)

    def chunks(self, total: int) -> list[tuple[int, int]]:
        """Return ``(first global position, length)`` of local tokens in unpacked batches."""
        pieces = self.cp if self.cp_layout == "contiguous" else 2 * self.cp if self.cp > 1 else 1
        if total % pieces or (total // self.cp) % self.sp:
            raise ConfigError(
                f"the sequence length must be a multiple of {pieces} chunks and of {self.ranks} "
                f"ranks, got {total}: pad the sequences."
            )
        size, count = total // pieces, total // self.ranks
        local = []
        for done, piece in enumerate([self.cp_rank, pieces - 1 - self.cp_rank]):
            # Intersect the chunk with this sequence-parallel rank's part.
            begin = max(self.sp_rank * count, done * size)
            end = min((self.sp_rank + 1) * count, (done + 1) * size)
            if begin < end:
                local.append((piece * size + begin - done * size, end - begin))
        return local

    def global_positions(self, total: int, offsets: torch.Tensor | None, device) -> torch.Tensor:
        """Return the global positions of each rank's tokens, int64 ``[ranks, total / ranks]``.

        Args:
            offsets: int ``[n + 1]``, cumulative padded lengths of packed sequences, each a multiple
                of ``2 * cp``, or ``None``.
        """
        self.chunks(total)
        if self.cp_layout == "zigzag" and offsets is not None and self.cp > 1:
            table = self._global_positions_by_document(total, offsets.long())
        elif self.cp_layout == "contiguous" or self.cp == 1:
            table = torch.arange(total, device=device)
        else:
            chunks = torch.arange(total, device=device).view(2 * self.cp, -1)
            table = torch.cat([chunks[: self.cp], chunks[self.cp :].flip(0)], 1)
        return table.reshape(self.ranks, -1)

    def _global_positions_by_document(self, total: int, offsets: torch.Tensor) -> torch.Tensor:
        # Treat padding past the end as one more sequence.
        offsets = torch.cat([offsets, offsets.new_full((1,), total)])
        local = torch.arange(total // self.cp, device=offsets.device)
        document = torch.bucketize(local * self.cp, offsets[1:], right=True)
        document = document.clamp_max(offsets.numel() - 2)
        first, chunk = offsets[document], offsets.diff()[document] // (2 * self.cp)
        inside = local - first // self.cp
        rank = torch.arange(self.cp, device=offsets.device)[:, None]
        second = first + (2 * self.cp - 1 - rank) * chunk + inside - chunk
        return torch.where(inside < chunk, first + rank * chunk + inside, second)

    def runs(self, documents: int | None) -> int:
        """Return the maximum number of runs of consecutive global positions on a rank.

        ``documents`` is the number of packed sequences, or ``None``.
        """
        if self.cp == 1 or self.cp_layout == "contiguous":
            return 1
        if self.cp_layout == "zigzag" and documents is not None:
            return 2 * (documents + 1)
        return 2


@dataclass(frozen=True, eq=False)
class KeyOwnership:
    """Assignment of global positions to the ranks that compute their keys.

    ``table`` is the result of :meth:`Sharding.global_positions`; ``batch`` counts tokens per
    position.
    """

    sharding: Sharding
    table: torch.Tensor
    batch: int

    def __post_init__(self):
        fix = "pass Sharding.global_positions of the same sharding"
        require_tensor("table", self.table, (self.sharding.ranks, "rows"), (torch.int64,), fix=fix)

    def of(self, sharding: Sharding) -> torch.Tensor:
        """Return the global positions of ``sharding.rank``; shardings may differ only in ``sp``."""
        return self.table.view(sharding.ranks, -1)[sharding.rank]

    @property
    def in_order(self) -> bool:
        return self.sharding.cp == 1 or self.sharding.cp_layout == "contiguous"


def sharded_layout(layout: Layout, sharding: Sharding, keys: KeyOwnership) -> Layout:
    """Return the layout of one rank's query tokens over all keys, which are ordered by rank.

    Args:
        layout: layout of all tokens.
        sharding: sharding of the query tokens; only ``sp`` may differ from ``keys.sharding``.
    """
    require(
        sharding.whole() == keys.sharding.whole(),
        f"sharding must differ from that of keys in its sequence parallelism at most, got "
        f"{sharding} and {keys.sharding}: take both from the same ranks",
    )
    count = keys.table.numel() * keys.batch
    require(
        count == layout.num_queries == layout.num_keys,
        f"keys must be of the {layout.num_queries} tokens of layout, got {count} (positions times "
        "batch): make both for the same batch",
    )
    if sharding.ranks == 1:
        return dataclasses.replace(layout, key_ownership=keys)
    global_positions, batch = keys.table, keys.batch
    local = keys.of(sharding)
    element = torch.arange(batch, device=local.device)
    tokens = (local[:, None] * batch + element).flatten()
    key_indices = torch.zeros(layout.num_keys, dtype=torch.int64, device=local.device)
    slots = element * (layout.num_keys // batch) + global_positions.flatten()[:, None]
    key_indices[slots.flatten()] = torch.arange(layout.num_keys, device=local.device)
    return _of_tokens(layout, tokens, _query_ranges(layout, sharding, keys), key_indices, keys)


def run_layout(layout: Layout, first: int, length: int) -> Layout:
    """Return the layout of query tokens at consecutive global positions over all keys."""
    keys, global_layout = layout.key_ownership, layout.all_tokens
    assert keys is not None
    tokens = slice(first * keys.batch, (first + length) * keys.batch)
    query_ranges = _chunk_ranges(global_layout, [(first, length)], keys.batch)
    return _of_tokens(global_layout, tokens, query_ranges, layout.key_indices, keys)


def _of_tokens(
    layout: Layout, tokens: torch.Tensor | slice, query_ranges, key_indices, keys: KeyOwnership
) -> Layout:
    start = layout.start[tokens]
    return dataclasses.replace(
        layout,
        num_queries=start.numel(),
        start=start,
        end=layout.end[tokens],
        position=layout.position[tokens],
        key_indices=key_indices,
        real=None if layout.real is None else layout.real[tokens],
        query_ranges=tuple(query_ranges),
        global_layout=layout,
        key_ownership=keys,
    )


def padded_bound(layout: Layout) -> int:
    """Return an upper bound of padded lengths: Megatron's ``max_seqlen`` excludes padding."""
    assert layout.sequences is not None
    padded = layout.sequences.cu_seqlens_padded is not None
    return layout.all_tokens.num_queries if padded else layout.max_length


def _query_ranges(layout: Layout, sharding: Sharding, keys: KeyOwnership) -> Iterator[QueryRange]:
    if layout.packed and sharding.cp_layout == "zigzag" and sharding.cp > 1:
        # A token deviates from even spacing by up to half a sequence.
        tokens, slack = layout.num_queries // sharding.ranks, -(-padded_bound(layout) // 2)
        yield QueryRange(
            slice(0, tokens, 1), 0, sharding.sp_rank * tokens * sharding.cp, layout.max_length,
            layout.num_keys, step=sharding.cp, slack=slack,
        )  # fmt: skip
    else:
        chunks = sharding.chunks(layout.num_queries // keys.batch)
        yield from _chunk_ranges(layout, chunks, keys.batch)


def _chunk_ranges(layout: Layout, chunks, batch: int) -> Iterator[QueryRange]:
    total = layout.num_queries // batch
    for e in range(batch):
        done = 0
        for first, length in chunks:
            tokens = slice(done * batch + e, (done + length - 1) * batch + e + 1, batch)
            yield QueryRange(tokens, e * total, first, layout.max_length, layout.num_keys)
            done += length


@tensor_cache(16)
def global_positions_of(sharding: Sharding, total: int, device: torch.device) -> torch.Tensor:
    return sharding.global_positions(total, None, device)
