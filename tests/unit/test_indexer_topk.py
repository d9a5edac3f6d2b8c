"""Index selection: exact, deterministic, ties to the smallest, any number of equal scores."""

import pytest
import torch

from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.errors import ConfigError
from megatron_dsa.layout import bshd_layout, packed_layout
from megatron_dsa.ops.indexer_topk import reference
from megatron_dsa.ops.indexer_topk.unfused import select
from tests.helpers import leaf

SMALL = Policy(workspace_bytes=20_000)


def integer_inputs(rows, heads=3, dim=4, *, device, seed=0, span=2, relu=True):
    """Small integers: scores are exact in fp32 whatever the order of sums, and ties abound."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-span, span + 1, shape, generator=generator).float()  # noqa: E731
    return IndexerInputs(
        draw(rows, heads, dim).to(device), draw(rows, dim).to(device),
        draw(rows, heads).to(device), relu,
    )  # fmt: skip


def expected(inputs, layout, k):
    """Selection per the reference, in slot order mapped to rows."""
    keys = layout.keys_in_slot_order(inputs.k)
    scores = reference.index_scores(
        inputs.q.double(), keys.double(), inputs.weights.double(), inputs.relu
    )
    slots = torch.arange(layout.num_keys, device=scores.device)
    visible = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    return layout.to_key_rows(reference.topk(scores, visible, k))


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(60, 1, device),
    "batch of 3": lambda device: bshd_layout(20, 3, device),
    "packed": lambda device: packed_layout(
        torch.tensor([0, 2, 2, 31, 55], device=device, dtype=torch.int32), 60, 29
    ),
}


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


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_all_scores_equal(device, value):
    """Trap 18: with nothing but ties the smallest keys win, and exactly K of them."""
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


def test_two_distinct_values_and_signed_zeros(device):
    scores = torch.tensor([[0.0, -0.0, 1.0, 0.0, -0.0, 1.0, 0.0]], device=device)
    visible = torch.ones_like(scores, dtype=torch.bool)
    assert select(scores, visible, 4)[0].tolist() == [0, 1, 2, 5]


def test_invisible_is_never_selected(device):
    scores = torch.tensor([[float("-inf"), 2.0, float("-inf"), 1.0]], device=device)
    visible = scores > float("-inf")
    assert select(scores, visible, 3)[0].tolist() == [1, 3, -1]


def test_bitwise_repeatable(device):
    """Trap 17: 20 repeats of the same selection, and any chunking, agree bit for bit."""
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


def test_wrong_arguments_are_named():
    inputs = integer_inputs(8, device="cpu")
    layout = bshd_layout(8, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match="topk"):
        indexer_topk(inputs, layout, 0)
    with pytest.raises(ConfigError, match=r"inputs\.k"):
        indexer_topk(IndexerInputs(inputs.q, inputs.k[:, :2], inputs.weights), layout, 2)
    with pytest.raises(ConfigError, match=r"inputs\.weights"):
        indexer_topk(IndexerInputs(inputs.q, inputs.k, inputs.weights[:, :1]), layout, 2)


@pytest.mark.gpu
def test_no_host_synchronisation():
    """Trap 24, packed batches included."""
    inputs = integer_inputs(60, device="cuda")
    cu = torch.tensor([0, 2, 31, 60], device="cuda", dtype=torch.int32)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            indexer_topk(inputs, packed_layout(cu, 60, 29), 5, policy=SMALL)
        finally:
            torch.cuda.set_sync_debug_mode("default")
