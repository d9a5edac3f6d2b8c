"""Tokens sharded over ranks: positions, host-side bounds, neighbours' tokens."""

import itertools

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.halo import halo_of
from megatron_dsa.ops.layout.sharding import CP_LAYOUTS, Sharding
from tests.host import packed
from tests.ranks import Case

CPU = torch.device("cpu")
TOTAL = 96
LENGTHS = (30, 3, 0, 40, 10)
PADDED = (32, 8, 0, 40, 16)
KINDS = {"one": (1, None), "two": (2, None), "packed": (1, (LENGTHS, PADDED))}
GRIDS = [(2, 1), (4, 1), (2, 2), (1, 3), (2, 3)]


def shardings(cp, sp, cp_layout):
    for cp_rank, sp_rank in itertools.product(range(cp), range(sp)):
        yield Sharding(cp, cp_rank, cp_layout, sp, sp_rank)


def layout_of(kind, sharding, by_sequence):
    batch, lengths = KINDS[kind]
    params = packed(*lengths[0], padded_lengths=lengths[1]) if lengths else None
    queries = sharding if by_sequence else sharding.whole()
    return layout_from_megatron(TOTAL // sharding.ranks, batch, CPU, params, sharding, queries)


def expected_places(kind, cp, cp_layout):
    lengths = KINDS[kind][1]
    case = Case("", "", (), (), rows=TOTAL, cp_layout=cp_layout)
    if lengths is not None:
        case = Case("", "", (), (), rows=TOTAL, cp_layout=cp_layout, padded=lengths[1], lengths=())
    return case.global_positions(cp)


@pytest.mark.parametrize("by_sequence", [True, False])
@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_layout_of_a_rank(cp, sp, kind, cp_layout, by_sequence):
    batch = KINDS[kind][0]
    whole = layout_of(kind, Sharding(), True)
    places = expected_places(kind, cp, cp_layout)
    stored = [place for held in places for place in held]  # keys, rank by rank
    for sharding in shardings(cp, sp, cp_layout):
        layout = layout_of(kind, sharding, by_sequence)
        own = places[sharding.cp_rank]
        if by_sequence:
            own = own[sharding.sp_rank * len(own) // sp :][: len(own) // sp]
        rows = [place * batch + e for place in own for e in range(batch)]
        assert layout.start.equal(whole.start[rows]) and layout.end.equal(whole.end[rows])
        assert layout.position.equal(whole.position[rows])
        for place, e in itertools.product(range(TOTAL), range(batch)):
            row = e * TOTAL + place if layout.key_indices is None else None
            row = int(layout.key_indices[e * TOTAL + place]) if row is None else row
            assert layout.key_indices is None or row == stored.index(place) * batch + e
        assert layout.real_tokens() == whole.real_tokens()
        for ratio in (0, 4, 7):
            seen = compressed_keys(layout, ratio, ratio == 4).layout if ratio else layout
            check_bounds(seen)
            check_cut(seen, exact=kind != "packed")


def check_cut(layout, exact):
    """Check that blocks end where queries see as much; with exact bounds, exactly there."""
    seen = layout.end - layout.start
    for cut, rows_at_once in itertools.product((1, 7, 40, 1000), (5, 1000)):
        found = torch.zeros(layout.num_queries, dtype=torch.int64)
        for block in layout.blocks(lambda _width, rows=rows_at_once: rows, cut):
            found[block.tokens] += 1
            if block.bound < cut:
                assert (seen[block.tokens] < cut).all()
            elif exact:
                assert (seen[block.tokens] >= cut).all()
        assert (found == 1).all()


def check_bounds(layout):
    """Check that blocks of any size hold every query once, with its keys."""
    for rows_at_once in (1, 5, 1000):
        found = torch.zeros(layout.num_queries, dtype=torch.int64)
        for block in layout.blocks(lambda _width, rows=rows_at_once: rows):
            assert 0 <= block.lo <= block.hi <= layout.num_keys
            found[block.tokens] += 1
            start, end = layout.start[block.tokens], layout.end[block.tokens]
            some = end > start
            assert (start[some] >= block.lo).all() and (end[some] <= block.hi).all()
        assert (found == 1).all()
    for first in range(0, layout.num_queries, 9):
        rows = slice(first, min(first + 9, layout.num_queries))
        assert layout.widest(rows) >= int((layout.end - layout.start)[rows].max())


@pytest.mark.parametrize("reach", [1, 6, 40])
@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_halo(cp, sp, kind, cp_layout, reach):
    batch = KINDS[kind][0]
    all_shardings = list(shardings(cp, sp, cp_layout))
    halos = [halo_of(layout_of(kind, s, True), s, reach) for s in all_shardings]
    keys = layout_of(kind, all_shardings[0], True).key_ownership
    start = layout_of(kind, Sharding(), True).start[::batch].tolist()
    shared = torch.cat(
        [keys.table[s.rank][h.shared] for s, h in zip(all_shardings, halos, strict=True)]
    )
    for sharding, halo in zip(all_shardings, halos, strict=True):
        own = keys.table[sharding.rank]
        buffer = torch.cat([own, shared]).tolist()
        held = halo.held.view(batch, -1)
        extended = [-1] * halo.length
        for at, source in zip(halo.before.tolist(), halo.source.tolist(), strict=True):
            extended[at] = int(shared[source]) if source >= 0 else -1
        for i, at in enumerate(halo.local.tolist()):
            extended[at] = int(own[i])
        for i, at in enumerate(halo.local.tolist()):
            place = int(own[i])
            for back in range(min(reach, place - start[place]) + 1):
                row = int(held[0, place - back])
                assert row >= 0 and buffer[row // batch] == place - back
                assert extended[at - back] == place - back
        used = held[0][held[0] >= 0]
        assert used.unique().numel() == used.numel()
        for e in range(batch):
            assert held[e][held[0] >= 0].equal(used + e)


def test_lengths_that_cannot_be_cut_are_refused():
    params = packed(6, 10)
    with pytest.raises(ConfigError, match=r"multiple of 2 \* context-parallel size = 4"):
        layout_from_megatron(8, 1, CPU, params, Sharding(cp=2))
    layout_from_megatron(8, 1, CPU, packed(6, 10), Sharding(cp=2, cp_layout="zigzag_rows"))


def test_padding_far_beyond_the_longest_sequence():
    """Real lengths bound visibility, not padded offsets."""
    for rank in range(4):
        params = packed(7, 9, padded_lengths=(64, 32))
        sharding = Sharding(cp=4, cp_rank=rank)
        check_bounds(layout_from_megatron(24, 1, CPU, params, sharding))


def test_what_cannot_be_spread_is_refused():
    with pytest.raises(ConfigError, match="multiple of 4 chunks and of 2 ranks"):
        Sharding(2, 0).chunks(6)
    with pytest.raises(ConfigError, match="multiple of 1 chunks and of 2 ranks"):
        Sharding(sp=2).chunks(7)
