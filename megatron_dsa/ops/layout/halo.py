"""Halo: other ranks' tokens before each run of local tokens.

Ranks all-gather the last ``reach`` positions of each run, at most a few hundred. Windows and groups
that begin on another rank need them.
"""

from dataclasses import dataclass

import torch

from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding


@dataclass(frozen=True, eq=False)
class Halo:
    """Index tables of a rank's halo, in positions of ``batch`` tokens (``held``: in tokens).

    *Extended* positions are ``[reach before the first run, first run, reach before the second,
    ...]``.

    Attributes:
        shared: int64 ``[C]``, local positions sent to other ranks; unused entries are 0.
        held: int64 ``[slots]``, slot -> index in ``[local tokens, shared tokens of rank 0, of rank
            1, ...]``; negative if absent.
        runs: int64 ``[ranks, positions]``, number of the run that has the position.
        local: int64 ``[positions]``, extended positions of local tokens.
        before: int64 ``[max_runs * reach]``, extended positions of halo tokens.
        source: int64 like ``before``: index in all shared positions, -1 before the sequence.
    """

    reach: int
    shared: torch.Tensor
    held: torch.Tensor
    runs: torch.Tensor
    local: torch.Tensor
    before: torch.Tensor
    source: torch.Tensor

    @property
    def length(self) -> int:
        return self.local.shape[0] + self.before.shape[0]


def halo_of(layout: Layout, sharding: Sharding, reach: int) -> Halo:
    """Return this rank's halo; query and key sharding may differ only in ``sp``."""
    return layout.derive(("halo", sharding, reach), lambda: _halo(layout, sharding, reach))


def _halo(layout: Layout, sharding: Sharding, reach: int) -> Halo:
    keys = layout.key_ownership
    assert keys is not None and layout.sequences is not None
    global_layout = layout.all_tokens
    global_positions = keys.table.view(sharding.ranks, -1)
    ranks, positions = global_positions.shape
    device = global_positions.device
    index = torch.arange(positions, device=device)
    most = sharding.runs(layout.sequences.count)

    begins = torch.ones_like(global_positions, dtype=torch.bool)
    begins[:, 1:] = global_positions[:, 1:] != global_positions[:, :-1] + 1
    runs = begins.cumsum(1) - 1
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    last = torch.where(ends, index, positions - 1).flip(1).cummin(1).values.flip(1)

    count = min(positions, most * reach)
    needed = last - index < reach
    shared_index = torch.where(needed, needed.cumsum(1) - 1, count)
    shared = torch.zeros(ranks, count + 1, dtype=torch.int64, device=device)
    shared.scatter_(1, shared_index, index.expand_as(global_positions))

    spare = global_layout.num_queries // keys.batch
    in_shared = torch.full((spare + 1,), -1, device=device)
    of_rank = count * torch.arange(ranks, device=device)[:, None] + shared_index
    in_shared.scatter_(0, torch.where(needed, global_positions, spare).flatten(), of_rank.flatten())
    in_shared = in_shared[:-1]
    held = torch.where(in_shared < 0, -1, positions + in_shared)
    held[global_positions[sharding.rank]] = index
    element = torch.arange(keys.batch, device=device)[:, None]
    held = (held * keys.batch + element).flatten()

    first = torch.full((most + 1,), positions, device=device)
    rank = sharding.rank
    first.scatter_(
        0, torch.where(begins[rank], runs[rank], most), torch.where(begins[rank], index, positions)
    )
    first = first[:most, None]
    offset = torch.arange(reach, device=device)
    before = first + reach * torch.arange(most, device=device)[:, None] + offset
    begin = global_positions[rank, first.clamp_max(positions - 1)]
    floor = global_layout.start[begin * keys.batch].long()
    position = begin - reach + offset
    exists = (first < positions) & (position >= floor)
    source = torch.where(exists, in_shared[position.clamp_min(0)], -1)
    extended = index + reach * (runs[rank] + 1)
    return Halo(reach, shared[rank, :-1], held, runs, extended, before.flatten(), source.flatten())
