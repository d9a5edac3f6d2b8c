"""Selection from the longest sequences, through dispatch like a layer."""

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout
from tests.helpers import peak_memory_above, skip_unless_they_run

CUDA = torch.device("cuda")
HEADS, DIM, TOPK, ROWS_CHECKED = 64, 128, 2048, 64
MIB = 2**20

pytestmark = pytest.mark.gpu


def draw(layout, integers):
    """Draw bf16 inputs; small integers make sums exact in any order, with many ties."""
    generator = torch.Generator(CUDA).manual_seed(11)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=CUDA).bfloat16()

    q, k = normal(layout.num_queries, HEADS, DIM), normal(layout.num_keys, DIM)
    weights = normal(layout.num_queries, HEADS)
    if integers:
        return IndexerInputs(q.round_(), k.round_(), weights.round_())
    return IndexerInputs(q, k, weights * (HEADS * DIM) ** -0.5)


def layouts(tokens, ratio):
    layout = bshd_layout(tokens, 1, CUDA)
    return layout if ratio == 1 else compressed_keys(layout, ratio).layout


def float64_scores(inputs, layout, row):
    """Return scores of the visible keys."""
    keys = inputs.k[: int(layout.end[row])].double()
    return (keys @ inputs.q[row].double().t()).relu_() @ inputs.weights[row].double()


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize(
    ("tokens", "ratio"), [(4096, 1), (32_768, 1), (131_072, 1), (32_768, 4), (131_072, 4)]
)
def test_against_float64(tokens, ratio, integers):
    skip_unless_they_run(("indexer_scores", "tilelang"), ("indexer_topk", "tilelang"))
    layout = layouts(tokens, ratio)
    inputs = draw(layout, integers)
    reset_report()
    indices, length = indexer_topk(inputs, layout, TOPK)
    assert report()["indexer_scores"].keys() == report()["indexer_topk"].keys() == {"tilelang"}
    for i in range(ROWS_CHECKED):
        row = tokens * (i + 1) // ROWS_CHECKED - 1 - i
        scores, chosen = float64_scores(inputs, layout, row), indices[row].long()
        count = min(TOPK, len(scores))
        assert int(length[row]) == count and bool((chosen[count:] == -1).all())
        chosen = chosen[:count]
        assert bool((chosen.diff() > 0).all())
        if integers:
            best = scores.sort(descending=True, stable=True).indices[:count].sort().values
            assert torch.equal(chosen, best)
        elif len(scores) > count:
            least = scores[chosen].min()
            rejected = scores.index_fill(0, chosen, float("-inf")).max()
            # fp32 cannot distinguish these scores.
            assert rejected - least <= 1e-6 * scores.abs().max()
    for _ in range(20):
        again = indexer_topk(inputs, layout, TOPK)
        assert torch.equal(again[0], indices) and torch.equal(again[1], length)


def test_memory_stays_within_the_workspace():
    skip_unless_they_run(("indexer_scores", "tilelang"), ("indexer_topk", "tilelang"))
    layout = layouts(131_072, 1)
    inputs = draw(layout, False)
    for mib in (64, 256):
        policy = Policy(workspace_bytes=mib * MIB)
        indexer_topk(inputs, layout, TOPK, policy=policy)  # compiles
        result, peak = peak_memory_above(
            lambda p=policy: indexer_topk(inputs, layout, TOPK, policy=p)
        )
        results = sum(x.numel() * x.element_size() for x in result)
        assert peak - results <= (mib + 24) * MIB
