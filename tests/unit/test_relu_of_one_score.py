"""What comparisons of runs on GPUs let pass: one score at an indexer's relu, and nothing else."""

import pytest
import torch

from tests.functional.comparisons import relu_let_one_score_through

LAYER = "decoder.layers.1.self_attention.core_attention.indexer"
HEADS, DIM, LATENT, HIDDEN = 4, 16, 32, 64


def vectors(*sizes):
    return [torch.randn(size, generator=GENERATOR) for size in sizes]


GENERATOR = torch.Generator().manual_seed(1)
SHAPES = {
    f"{LAYER}.linear_wq_b.weight": (HEADS * DIM, LATENT),
    f"{LAYER}.linear_wk.weight": (DIM, HIDDEN),
    f"{LAYER}.k_norm.weight": (DIM,),
    f"{LAYER}.linear_weights_proj.weight": (HEADS, HIDDEN),
    f"{LAYER.replace('1', '0')}.linear_wk.weight": (DIM, HIDDEN),
    "decoder.layers.1.self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
}
QUERIES, KEYS, NORM, WEIGHTS, OTHER_LAYER, OTHER = SHAPES


@pytest.fixture
def gradients():
    """Expected ones, and those of a run in which one key gives one head of one query more."""
    expected = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}
    got = {name: x + 1e-7 * torch.randn(x.shape, generator=GENERATOR)
           for name, x in expected.items()}  # fmt: skip
    own = got[QUERIES].view(HEADS, DIM, LATENT)[2]
    own += 1e-3 * torch.outer(*vectors(DIM, LATENT))
    got[KEYS] += 1e-3 * torch.outer(*vectors(DIM, HIDDEN))
    got[NORM] += 1e-3 * vectors(DIM)[0]
    return got, expected


def test_one_score_is_recognised(gradients):
    assert relu_let_one_score_through({QUERIES, KEYS, NORM}, *gradients)
    assert relu_let_one_score_through({QUERIES, KEYS}, *gradients)


@pytest.mark.parametrize(
    "names",
    [
        set(), {QUERIES}, {KEYS}, {QUERIES, NORM}, {QUERIES, KEYS, WEIGHTS},
        {QUERIES, KEYS, OTHER_LAYER}, {QUERIES, KEYS, OTHER}, {OTHER},
    ],
)  # fmt: skip
def test_other_weights_are_not(names, gradients):
    assert not relu_let_one_score_through(names, *gradients)


def test_two_heads_are_not(gradients):
    gradients[0][QUERIES].view(HEADS, DIM, LATENT)[0] += 1e-3 * torch.outer(*vectors(DIM, LATENT))
    assert not relu_let_one_score_through({QUERIES, KEYS}, *gradients)


@pytest.mark.parametrize("name", [QUERIES, KEYS])
def test_two_scores_are_not(name, gradients):
    rows = gradients[0][name].view(-1, DIM, SHAPES[name][1])[min(2, SHAPES[name][0] // DIM - 1)]
    rows += 1e-3 * torch.outer(*vectors(*rows.shape))
    assert not relu_let_one_score_through({QUERIES, KEYS}, *gradients)
