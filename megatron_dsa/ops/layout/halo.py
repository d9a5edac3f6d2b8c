"""Rows that a rank needs of its neighbours: the last ones before each of its runs of rows.

A window looks back over a few positions, and a group of positions may begin on another rank. Ranks
share the last ``reach`` rows of each of their runs (all-gathered: a few hundred rows), so that
lengths on the device need no host synchronisation: how many runs there are at most is known.
"""

from dataclasses import dataclass

import torch

from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding


@dataclass(frozen=True, eq=False)
class Halo:
    """Tables of one rank for one reach; all but ``held`` count global_positions (``batch`` rows
    each).

    *Extended* rows are ``[reach rows before the first run, first run, reach rows before the second,
    second run, ...]``.

    Attributes:
        reach: how far before its tokens a rank needs others'.
        shared: int64 ``[C]``, which of its tokens a rank shares, in order; unused entries are 0.
        held: int64 ``[slots]``, where a slot's row lies in ``[own tokens, shared rows of rank 0, of
            rank 1, ...]``; negative if it is not among them.
        runs: int64 ``[ranks, rows]``, for every rank's token the number of its run.
        own: int64 ``[tokens]``, which extended rows are this rank's own.
        before: int64 ``[most runs * reach]``, the extended rows that are not own tokens.
        source: int64 like ``before``: their global_positions among the shared rows of all ranks, -1
            where nothing is before.
    """

    reach: int
    shared: torch.Tensor
    held: torch.Tensor
    runs: torch.Tensor
    own: torch.Tensor
    before: torch.Tensor
    source: torch.Tensor

    @property
    def length(self) -> int:
        """Number of extended rows."""
        return self.own.shape[0] + self.before.shape[0]


def halo_of(layout: Layout, sharding: Sharding, reach: int) -> Halo:
    """Return the halo of this rank of ``sharding``, formed once per layout.

    ``sharding`` is that of the keys (``layout.key_ownership``) or without its sequence parallelism.
    """
    return layout.derive(("halo", sharding, reach), lambda: _halo(layout, sharding, reach))


def _halo(layout: Layout, sharding: Sharding, reach: int) -> Halo:
    keys = layout.key_ownership
    assert keys is not None and layout.sequences is not None
    global_layout = layout.all_tokens
    global_positions = keys.table.view(sharding.ranks, -1)
    ranks, rows = global_positions.shape
    device = global_positions.device
    row = torch.arange(rows, device=device)
    most = sharding.runs(layout.sequences.count)

    begins = torch.ones_like(global_positions, dtype=torch.bool)
    begins[:, 1:] = global_positions[:, 1:] != global_positions[:, :-1] + 1
    runs = begins.cumsum(1) - 1
    # The last row of each token's run: the nearest one from here on that the next does not
    # continue.
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    last = torch.where(ends, row, rows - 1).flip(1).cummin(1).values.flip(1)

    count = min(rows, most * reach)
    needed = last - row < reach
    place_in_shared = torch.where(needed, needed.cumsum(1) - 1, count)
    shared = torch.zeros(ranks, count + 1, dtype=torch.int64, device=device)
    shared.scatter_(1, place_in_shared, row.expand_as(global_positions))

    place_count = global_layout.num_queries // keys.batch
    spare = place_count
    in_shared = torch.full((place_count + 1,), -1, device=device)
    of_rank = count * torch.arange(ranks, device=device)[:, None] + place_in_shared
    in_shared.scatter_(0, torch.where(needed, global_positions, spare).flatten(), of_rank.flatten())
    in_shared = in_shared[:-1]
    held = torch.where(in_shared < 0, -1, rows + in_shared)
    held[global_positions[sharding.rank]] = row
    element = torch.arange(keys.batch, device=device)[:, None]
    held = (held * keys.batch + element).flatten()

    # Runs that do not exist would begin behind the last row.
    first = torch.full((most + 1,), rows, device=device)
    own = sharding.rank
    first.scatter_(
        0, torch.where(begins[own], runs[own], most), torch.where(begins[own], row, rows)
    )
    first = first[:most, None]
    offset = torch.arange(reach, device=device)
    before = first + reach * torch.arange(most, device=device)[:, None] + offset
    begin = global_positions[own, first.clamp_max(rows - 1)]
    # Nothing is needed of before the sequence that a run begins in.
    floor = global_layout.start[begin * keys.batch].long()
    place = begin - reach + offset
    exists = (first < rows) & (place >= floor)
    source = torch.where(exists, in_shared[place.clamp_min(0)], -1)
    extended = row + reach * (runs[own] + 1)
    return Halo(reach, shared[own, :-1], held, runs, extended, before.flatten(), source.flatten())
