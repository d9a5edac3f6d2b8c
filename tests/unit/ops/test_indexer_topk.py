"""Index selection: exact, deterministic, ties to the smallest, any number of equal scores."""

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_topk.torch import Scores, Selection
from megatron_dsa.ops.layout.layout import Seen, bshd_layout, packed_layout
from tests.cases.indexer_topk import LAYOUTS, expected, integer_inputs
from tests.helpers import leaf, never_waits

SMALL = Policy(workspace_bytes=20_000)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("k", [1, 5, 16, 80])
@pytest.mark.parametrize("relu", [True, False])
def test_matches_reference(device, name, k, relu):
    layout = LAYOUTS[name](device)
    inputs = integer_inputs(60, device=device, relu=relu)
    indices, length = indexer_topk(inputs, layout, k, policy=SMALL)
    assert indices.dtype == torch.int32 and indices.shape == (60, k)
    assert torch.equal(indices, expected(inputs, layout, k))
    assert torch.equal(length, (indices >= 0).sum(-1).int())


@pytest.fixture
def scored(monkeypatch):
    """Return the numbers of scored pairs of every call."""
    pairs, form = [], Scores.__call__

    def spy(self, inputs, block, keys, seen):
        pairs.append(int((seen.end - seen.start).sum()))
        return form(self, inputs, block, keys, seen)

    monkeypatch.setattr(Scores, "__call__", spy)
    return pairs


def select_all(layout, topk):
    inputs = integer_inputs(60, device=layout.start.device)
    indices, length = indexer_topk(inputs, layout, topk, policy=Policy(fused=False))
    assert torch.equal(indices, expected(inputs, layout, topk))
    assert torch.equal(length, (indices >= 0).sum(-1).int())


def test_first_queries_of_a_sequence_need_no_scores(scored):
    select_all(bshd_layout(60, 1, torch.device("cpu")), 20)
    assert sum(scored) == sum(range(21, 61))


@pytest.mark.parametrize(("topk", "pairs"), [(30, 0), (20, sum(range(21, 31))), (5, None)])
def test_short_documents_need_no_scores(scored, topk, pairs):
    ends = torch.tensor([0, 12, 13, 13, 43, 57], dtype=torch.int32)
    layout = packed_layout(ends, 60, 30)
    select_all(layout, topk)
    if pairs is None:
        pairs = sum(max(0, n) for size in ends.diff().tolist() for n in range(topk + 1, size + 1))
    assert sum(scored) == pairs
    assert bool(scored) == (topk < 30)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("topk", [8, 5])
def test_a_selection_may_write_where_it_belongs(monkeypatch, name, topk):
    """Only if columns are key indices, aligned to 16 bytes."""
    given = []

    class Writes(Selection):
        takes_out = True

        def __call__(self, scores, seen, topk, out=None):
            found = super().__call__(scores, seen, topk)
            if out is None:
                return found
            assert out.is_contiguous() and out.data_ptr() % 16 == 0
            given.append(out)
            return out.copy_(found)

    monkeypatch.setattr("megatron_dsa.ops.indexer_topk.torch.Selection", Writes)
    layout = LAYOUTS[name](torch.device("cpu"))
    inputs = integer_inputs(60, device="cpu")
    indices, _ = indexer_topk(inputs, layout, topk, policy=SMALL)
    assert torch.equal(indices, expected(inputs, layout, topk))
    direct = layout.key_indices is None and layout.real is None
    assert direct or not given
    assert not direct or topk != 8 or given


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_all_scores_equal(device, value):
    layout = bshd_layout(50, 1, device)
    inputs = IndexerInputs(
        torch.ones(50, 2, 4, device=device),
        torch.ones(50, 4, device=device),
        torch.full((50, 2), value, device=device),
    )
    indices, _ = indexer_topk(inputs, layout, 8, policy=SMALL)
    for t, row in enumerate(indices.tolist()):
        count = min(8, t + 1)
        assert row == list(range(count)) + [-1] * (8 - count)


def select(rows, ranges, topk, device):
    """Return the columns selected by torch from ``rows`` with visible ``ranges``."""
    start, end = torch.tensor(ranges, dtype=torch.int32, device=device).t().contiguous()
    return Selection()(torch.tensor(rows, device=device), Seen(start, end), topk).tolist()


def test_two_distinct_values_and_signed_zeros(device):
    rows = [[0.0, -0.0, 1.0, 0.0, -0.0, 1.0, 0.0]]
    assert select(rows, [(0, 7)], 4, device) == [[0, 1, 2, 5]]


@pytest.mark.parametrize("unseen", [float("nan"), float("inf"), float("-inf"), 9.0])
def test_what_is_not_seen_may_hold_anything(device, unseen):
    x = unseen
    rows = [[x, 2.0, 1.0, 3.0, x], [x, x, -7.0, x, x], [x, x, x, x, x], [1.0, 3.0, 2.0, x, x]]
    ranges = [(1, 4), (2, 3), (3, 3), (0, 3)]
    assert select(rows, ranges, 2, device) == [[1, 3], [2, -1], [-1, -1], [1, 2]]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("workspace", [1, 20_000, 2**26])
def test_scores_may_leave_out_what_is_not_seen(add, name, workspace):
    blocks = []

    def sparing(original):
        def implementation(inputs, block, keys, seen):
            blocks.append((len(seen.start), block.width))
            scores = original(inputs, block, keys, seen)
            return scores.masked_fill(~seen.columns(block.width), float("nan"))

        return implementation

    add("indexer_scores", sparing)
    layout = LAYOUTS[name](torch.device("cpu"))
    inputs = integer_inputs(60, device="cpu")
    indices, _ = indexer_topk(inputs, layout, 5, policy=Policy(workspace_bytes=workspace))
    assert torch.equal(indices, expected(inputs, layout, 5))
    # Scores of 3 heads and their sum, and torch's selection.
    assert blocks and all(n == 1 or n * width * (16 + 32) <= workspace for n, width in blocks)
    assert (workspace > 1) == any(n > 1 for n, _ in blocks)


def test_bitwise_repeatable(device):
    inputs = IndexerInputs(
        leaf(300, 4, 16, seed=1, device=device, dtype=torch.bfloat16).detach(),
        leaf(300, 16, seed=2, device=device, dtype=torch.bfloat16).detach(),
        leaf(300, 4, seed=3, device=device, dtype=torch.bfloat16).detach(),
    )
    layout = bshd_layout(300, 1, device)
    first, _ = indexer_topk(inputs, layout, 40)
    for _ in range(20):
        again, _ = indexer_topk(inputs, layout, 40)
        assert torch.equal(first, again)


def test_no_keys_are_refused():
    with pytest.raises(ConfigError, match="topk must be at least 1, got 0"):
        indexer_topk(integer_inputs(8, device="cpu"), bshd_layout(8, 1, torch.device("cpu")), 0)


@pytest.mark.gpu
def test_no_host_synchronisation():
    inputs = integer_inputs(60, device="cuda")
    cu = torch.tensor([0, 2, 31, 60], device="cuda", dtype=torch.int32)
    never_waits(lambda: indexer_topk(inputs, packed_layout(cu, 60, 29), 5, policy=SMALL))
