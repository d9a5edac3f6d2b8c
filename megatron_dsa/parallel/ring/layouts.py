"""The rows of a rank as attention over ranks wants them, from the layout of a microbatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_dsa.errors import ConfigError
from megatron_dsa.parallel.ring.runs import PackedRuns
from megatron_dsa.parallel.ring.shards import (
    ContiguousShard,
    PackedZigzagShard,
    TokenShard,
    ZigzagShard,
)
from megatron_dsa.sequence.layout import Layout
from megatron_dsa.sequence.sharding import Sharding, padded_bound


def token_shard(layout: Layout) -> TokenShard:
    """Return the rows of the layout of a context-parallel rank, formed once per layout.

    Args:
        layout: of the query rows of a context-parallel rank (or of the only one), all parts of
            sequence parallelism together; of any ``cp_layout``, packed or not.

    Raises:
        ConfigError: the layout does not say which sequences there are, or has other keys.
    """
    if layout.sequences is None:
        raise ConfigError(
            "layout must be one of sequences, got ranges of slots: make it with bshd_layout, "
            "packed_layout or layout_from_megatron."
        )
    return layout.derive("ring", lambda: _shard(layout))


def _shard(layout: Layout) -> TokenShard:
    sequences, count = layout.sequences, layout.num_queries
    assert sequences is not None
    keys = layout.key_ownership
    sharding = Sharding() if keys is None else keys.sharding.whole()
    cp, rank = sharding.cp, sharding.cp_rank
    if layout.num_keys != cp * count:
        raise ConfigError(
            f"layout must have as many keys as query tokens, {cp * count} on {cp} ranks, got "
            f"{layout.num_keys}: make both for the same batch."
        )
    if sequences.cu_seqlens is None:
        kind = ContiguousShard if sharding.cp_layout == "contiguous" else ZigzagShard
        return kind(cp, rank, sequences.batch, count // sequences.batch)
    lengths: dict[str, Any] = {
        "cu_seqlens": sequences.cu_seqlens,
        "cu_seqlens_padded": sequences.cu_seqlens_padded,
    }
    if sharding.cp_layout == "zigzag" and cp > 1:
        return PackedZigzagShard(cp, rank, count, max_seqlen=padded_bound(layout), **lengths)
    runs = (dataclasses.replace(sharding, cp_rank=r).chunks(count * cp) for r in range(cp))
    return PackedRuns(
        cp, rank, count, max_seqlen=layout.max_length, runs=tuple(map(tuple, runs)), **lengths
    )
