"""Ranks that score each other's tokens: equal work, minimal traffic, the same selection."""

import itertools

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.layers.parallel import balanced_topk as module
from megatron_dsa.layers.parallel.balanced_topk import balanced_topk, swap_of
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.sharding import Sharding
from tests.host import packed
from tests.ranks import spawn

CPU = torch.device("cpu")
TOTAL = 96
#: ``(cp, layout, sp)`` with unequal work per rank.
UNEVEN = [
    (2, "contiguous", 1),
    (3, "contiguous", 1),
    (4, "contiguous", 1),
    (8, "contiguous", 1),
    (1, "zigzag", 2),
    (1, "zigzag", 4),
    (1, "zigzag", 8),
    (2, "contiguous", 2),
    (2, "contiguous", 3),
    (2, "zigzag", 2),
    (2, "zigzag", 3),
    (4, "zigzag", 2),
    (2, "zigzag", 4),
]


def shardings(cp, cp_layout, sp):
    for cp_rank, sp_rank in itertools.product(range(cp), range(sp)):
        yield Sharding(cp, cp_rank, cp_layout, sp, sp_rank)


@pytest.mark.parametrize(("cp", "cp_layout", "sp"), UNEVEN)
def test_every_rank_scores_the_mean(cp, cp_layout, sp):
    total = 16 * cp * sp
    all_shardings = list(shardings(cp, cp_layout, sp))
    swaps = [swap_of(sharding, total) for sharding in all_shardings]
    places = all_shardings[0].global_positions(total, None, CPU)
    size = swaps[0].size
    assert size == total // (2 * cp * sp)
    work, before = [], []
    for rank, swap in enumerate(swaps):
        # Tokens are the declared halves, in this order.
        own = (swap.given, swap.kept) if swap.kept_second else (swap.kept, swap.given)
        halves = [range(half * size, (half + 1) * size) for half in own]
        assert places[rank].tolist() == [place for half in halves for place in half]
        assert swaps[swap.to].taken == swap.given and swaps[swap.to].source == rank
        assert swaps[swap.source].given == swap.taken and swaps[swap.source].to == rank
        scored = [half * size + i for half in (swap.kept, swap.taken) for i in range(size)]
        work.append(sum(place + 1 for place in scored))
        before.append(int((places[rank] + 1).sum()))
    assert sorted(half for swap in swaps for half in (swap.kept, swap.taken)) == list(
        range(2 * cp * sp)
    )
    assert set(work) == {sum(before) // len(swaps)}
    longest = max(before) / (sum(before) / len(before))
    assert len({swap.longest_to_mean for swap in swaps}) == 1
    assert swaps[0].longest_to_mean == pytest.approx(longest, rel=0.02) and longest > 1.1


@pytest.mark.parametrize(("cp", "cp_layout", "sp"), [u for u in UNEVEN if u[0] * u[2] <= 6])
def test_as_many_halves_as_possible_stay(cp, cp_layout, sp):
    """No assignment of equal work may leave more halves in place."""
    swaps = [swap_of(sharding, TOTAL) for sharding in shardings(cp, cp_layout, sp)]
    ranks = cp * sp
    held = [{swap.kept, swap.given} for swap in swaps]
    pairs = [{k, 2 * ranks - 1 - k} for k in range(ranks)]
    most = max(
        sum(len(own & pair) for own, pair in zip(held, order, strict=True))
        for order in itertools.permutations(pairs)
    )
    assert sum(len(own & {s.kept, s.taken}) for own, s in zip(held, swaps, strict=True)) == most


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_zigzag_alone_is_even(cp):
    for rank, sharding in enumerate(shardings(cp, "zigzag", 1)):
        swap = swap_of(sharding, TOTAL)
        assert swap.longest_to_mean == 1 and swap.to == swap.source == rank


def test_rows_that_have_no_equal_halves():
    assert swap_of(Sharding(cp=2, cp_layout="contiguous"), 6) is None
    assert swap_of(Sharding(sp=2), 10) is None


NOTHING = {
    "even": (Sharding(cp=2), TOTAL, None, 3),
    "one rank": (Sharding(), TOTAL, None, 3),
    "packed": (Sharding(cp=2, cp_layout="contiguous"), TOTAL, (80, 16), 3),
    "few keys": (Sharding(cp=2, cp_layout="contiguous"), TOTAL, None, 13),
    "odd": (Sharding(cp=2, cp_layout="contiguous"), 98, None, 3),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_exchanged(name, monkeypatch):
    sharding, total, lengths, topk = NOTHING[name]
    params = None if lengths is None else packed(*lengths)
    layout = layout_from_megatron(total // sharding.ranks, 1, CPU, params, sharding)
    called = []

    def plain(inputs, layout, topk, **settings):
        called.append((inputs, layout, topk))
        return called

    monkeypatch.setattr(module, "indexer_topk", plain)
    inputs = object()
    reset_report()
    # Without a group there is no exchange.
    assert balanced_topk(inputs, layout, topk, Ranks(sharding)) is called
    assert called == [(inputs, layout, topk)] and called[0][1] is layout
    assert "indexer_balance" not in report()


#: Grids ``(cp, layout, sp, by sequence)``.
GRIDS = [
    (2, "contiguous", 1, False),
    (1, "zigzag", 2, True),
    (3, "contiguous", 1, False),  # the middle rank has a pair already
    (4, "contiguous", 1, False),
    (1, "zigzag", 4, True),
    (2, "contiguous", 2, True),
    (2, "zigzag", 2, True),
    (2, "contiguous", 2, False),
]
KINDS = list(itertools.product((1, 2), (1, 4)))  # batch, ratio


def _select(grid, *_):
    """Return selections of a grid's ranks by batch and ratio; other processes only create
    groups.
    """
    ranks = _ranks(torch.distributed.get_rank(), *grid)
    return ranks and {kind: _selections(ranks, *kind) for kind in KINDS}


def _ranks(rank, cp, cp_layout, sp, by_sequence):
    """Use the first processes as grid; the others only help to create groups."""
    group = torch.distributed.new_group(range(cp * sp))
    across = [torch.distributed.new_group(range(part, cp * sp, sp)) for part in range(sp)]
    if rank >= cp * sp:
        return None
    sharding = Sharding(cp, rank // sp, cp_layout, sp, rank % sp)
    tp = object() if sp > 1 else None  # unused by the selection
    mode = "sequence" if by_sequence else "heads"
    return Ranks(sharding, group, tp, across[rank % sp] if cp > 1 else None, mode)


def _selections(ranks, batch, ratio):
    """Select separately and together; return both, and the scored visible pairs."""
    layout = layout_from_megatron(
        TOTAL // ranks.sharding.ranks, batch, CPU, None, ranks.sharding, ranks.query_sharding
    )
    compressed = compressed_keys(layout, ratio) if ratio > 1 else None
    visible = layout if compressed is None else compressed.layout
    inputs, topk = random_inputs(layout, visible.num_keys), 12 // ratio
    scored, original = [], module.indexer_topk

    def recorded(inputs, layout, *args, **settings):
        scored.append(int((layout.end - layout.start).sum()))
        return original(inputs, layout, *args, **settings)

    module.indexer_topk = recorded
    reset_report()
    with torch.inference_mode():
        evaluated = balanced_topk(inputs, layout, topk, ranks, compressed=compressed)
    # Computations of the evaluation are reused by the training step.
    trained = balanced_topk(inputs, layout, topk, ranks, compressed=compressed)
    as_engine = {"policy": Policy(indexer_numerics="deepgemm-fp8")}
    engine = balanced_topk(inputs, layout, topk, ranks, compressed=compressed, **as_engine)
    module.indexer_topk = original
    return {
        "alone": indexer_topk(inputs, visible, topk),
        "engine alone": indexer_topk(inputs, visible, topk, **as_engine),
        "engine": tuple(x.clone() for x in engine),
        "together": [tuple(x.clone() for x in pair) for pair in (evaluated, trained)],
        "scored": sum(scored) / 3,
        "seen": int((visible.end - visible.start).sum()),
        "count": report().get("indexer_balance"),
    }


def random_inputs(layout, num_keys):
    """Draw inputs of a rank's tokens, with many equal scores; keys are equal on all ranks."""
    generator = torch.Generator().manual_seed(5)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=generator).double()

    rows = layout.all_tokens.num_queries
    q, weights, k = whole(rows, 2, 3), whole(rows, 2), whole(num_keys, 3)
    # By slot, independent of the number of ranks.
    own = layout.start + layout.position
    # Other weights, in reverse.
    return IndexerInputs(
        q[own].requires_grad_(), k, weights[own], fp32_weights=weights.flip(1)[own].float()
    )


@pytest.fixture(scope="module")
def selections(tmp_path_factory):
    """Return every rank's selections, by grid, then ``(batch, ratio)``."""
    return spawn(_select, {grid: grid for grid in GRIDS}, 4, tmp_path_factory.mktemp("balance"))


SELECTIONS = [
    pytest.param(grid, *kind, id=f"cp{grid[0]}-{grid[1]}-tp{grid[2]}-rows{grid[3]}-{kind}")
    for grid in GRIDS
    for kind in KINDS
]


@pytest.mark.parametrize(("grid", "batch", "ratio"), SELECTIONS)
def test_the_selection_is_that_of_the_rank_alone(grid, batch, ratio, selections):
    found = [rank[grid][batch, ratio] for rank in selections[: grid[0] * grid[2]]]
    mean = sum(one["seen"] for one in found) / len(found)
    for one in found:
        indices, length = one["alone"]
        assert (length > 0).any() and (indices[length > 0, 0] >= 0).all()
        for got in one["together"]:
            assert got[0].dtype == torch.int32 and got[0].equal(indices)
            assert got[1].dtype == torch.int32 and got[1].equal(length)
        # Compressed keys become visible one group at a time.
        assert one["scored"] == pytest.approx(mean, rel=0 if ratio == 1 else 0.05)
        assert one["count"] == {"exchanged": 3}
        assert all(a.equal(b) for a, b in zip(one["engine"], one["engine alone"], strict=True))
        assert not one["engine"][0].equal(indices)
    assert max(one["seen"] for one in found) > 1.1 * mean
