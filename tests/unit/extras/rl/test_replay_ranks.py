"""Capture and replay on tensor- and context-parallel ranks: exact, with the same keys."""

import pytest
import torch

from tests.cases.layers import case
from tests.helpers import deterministic
from tests.ranks import build, spawn

#: Ranks -> (layer, batch, mode).
CASES = {
    (1, 2): [
        ("DSA", "packed", "zigzag"),
        ("DSA", "two", "contiguous"),
        ("CSA", "packed", "zigzag_rows"),
        ("CSA recomputed", "two", "zigzag"),
        ("DSA masked", "packed", "zigzag"),
    ],
    (2, 1): [
        ("DSA masked", "packed", "select"),
        ("DSA masked recomputed", "two", "select"),
    ],
    (2, 2): [
        ("DSA", "packed", "zigzag heads"),
        ("DSA recomputed", "two", "zigzag rows"),
        ("CSA", "packed", "contiguous rows"),
        ("CSA", "two", "zigzag heads"),
        ("DSA masked", "two", "zigzag heads"),
        ("DSA masked recomputed", "packed", "zigzag select"),
    ],
}


def step(module, x, packing):
    """Return output and every gradient; x is a leaf."""
    module.zero_grad()
    x.grad = None
    out, _ = module(x, None, packed_seq_params=packing)
    out.square().sum().backward()
    return [out.detach(), x.grad.clone()] + [p.grad.clone() for p in module.parameters()]


def equal(one, other):
    return [a.equal(b) for a, b in zip(one, other, strict=True)]


def _run_case(given, tp, cp):
    """Run a case, on a GPU in torch's deterministic mode for equal sums of gradients."""
    with deterministic():
        return _replayed(given, tp, cp)


def _replayed(given, tp, cp):
    from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
    from megatron_dsa.ops.dispatch import report, reset_report

    case, whole = given
    module, x, packing = build(case, tp, cp)
    with IndexCapture().on(module) as capture:
        expected = step(module, x, packing)
    (own,) = capture.microbatches
    backwards = {1: own[1].flip(1)}  # in another order, -1 first
    reset_report()
    with IndexReplay([backwards]).on(module):
        of_rank = step(module, x, packing)
    with IndexReplay([{1: whole.to(x.device)}]).on(module):
        of_all = step(module, x, packing)
    selected = "indexer_topk" in report()
    again = step(module, x, packing)
    return {
        "positions": own[1],
        "replayed": equal(of_rank, expected),
        "replayed of all": equal(of_all, expected),
        "repeated": equal(again, expected),
        "selected": (selected, "indexer_topk" in report()),
    }


@pytest.fixture(scope="module")
def alone():
    from megatron_dsa.extras.rl.replay import IndexCapture

    def positions(layer, rows, mode):
        module, x, packing = build(case(layer, rows, mode))
        with IndexCapture().on(module) as capture:
            step(module, x, packing)
        return capture.microbatches[0][1].cpu()

    return {name: positions(*name) for names in CASES.values() for name in names}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, alone):
    found = {}
    for (tp, cp), names in CASES.items():
        folder = tmp_path_factory.mktemp("replay")
        cases = {name: (case(*name), alone[name]) for name in names}
        found[tp, cp] = spawn(_run_case, cases, tp, folder, cp)
    return found


@pytest.mark.parametrize(
    ("tp", "cp", "name"),
    [
        pytest.param(*grid, name, id=f"tp{grid[0]}-cp{grid[1]}-{'-'.join(name)}")
        for grid, names in CASES.items()
        for name in names
    ],
)
def test_replay_on_ranks(tp, cp, name, ranks, alone):
    check(name, [found[name] for found in ranks[tp, cp]], tp, cp, alone[name])


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 1)])
def test_replay_with_nccl(tp, cp, alone, tmp_path):
    """A GPU per rank."""
    if torch.cuda.device_count() < tp * cp:
        pytest.skip(f"needs {tp * cp} GPUs, found {torch.cuda.device_count()}")
    names = CASES[tp, 2]
    cases = {name: (case(*name), alone[name]) for name in names}
    found = spawn(_run_case, cases, tp, tmp_path, cp, "nccl")
    for name in names:
        check(name, [rank[name] for rank in found], tp, cp, alone[name])


def check(name, ranks, tp, cp, alone):
    """Check every rank's results against one rank's selections."""
    one = case(*name)
    for index, rank in enumerate(ranks):
        assert all(rank["repeated"])  # otherwise the rest would prove nothing
        assert all(rank["replayed"]) and all(rank["replayed of all"])
        assert rank["selected"] == (False, True)  # in the replays, in the following step
        place = torch.tensor(one.global_positions(cp)[index // tp])
        own = place.chunk(tp)[index % tp]
        rows = place if len(rank["positions"]) == len(place) * one.batch else own
        rows = (rows[:, None] * one.batch + torch.arange(one.batch)).flatten()
        assert rank["positions"].equal(alone[rows])
