"""The rows of a rank as attention over ranks wants them, from the layout of a microbatch."""

from __future__ import annotations

import dataclasses

from megatron_dsa.errors import ConfigError
from megatron_dsa.parallel.ring.rows import ContiguousRows, PackedZigzagRows, Rows, ZigzagRows
from megatron_dsa.parallel.ring.runs import PackedRuns
from megatron_dsa.sequence.layout import Layout
from megatron_dsa.sequence.sharding import padded_bound


def ring_rows(layout: Layout) -> Rows:
    """Return the rows of the layout of a context-parallel rank, formed once per layout.

    Args:
        layout: of the query rows of a context-parallel rank, all parts of sequence parallelism
            together; of any ``cp_layout``, packed or not.

    Raises:
        ConfigError: the layout does not say how rows are spread.
    """
    if layout.key_places is None:
        raise ConfigError(
            "layout must be that of rows spread over context-parallel ranks, got one of all rows; "
            "use dense_attention."
        )
    return layout.derive("ring", lambda: _rows(layout))


def _rows(layout: Layout) -> Rows:
    keys, count = layout.key_places, layout.num_queries
    spread = keys.spread.whole()
    cp, rank = spread.cp, spread.cp_rank
    if keys.cu_seqlens is None:
        kind = ContiguousRows if spread.cp_layout == "contiguous" else ZigzagRows
        return kind(cp, rank, keys.batch, count // keys.batch)
    lengths = {"cu_seqlens": keys.cu_seqlens, "cu_seqlens_padded": keys.cu_seqlens_padded}
    if spread.cp_layout == "zigzag":
        return PackedZigzagRows(cp, rank, count, max_seqlen=padded_bound(layout, keys), **lengths)
    runs = (dataclasses.replace(spread, cp_rank=r).chunks(count * cp) for r in range(cp))
    return PackedRuns(
        cp, rank, count, max_seqlen=layout.max_length, runs=tuple(map(tuple, runs)), **lengths
    )
