"""The indexer's loss on a share of the query tokens: without bias, in every attention."""

import functools

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    absorbed_attention,
    key_bits,
    masked_attention,
    sparse_attention,
)
from megatron_dsa.ops.indexer_loss.sample import TILE, draw_sample, sample_size, sampled_tokens
from megatron_dsa.ops.layout.layout import bshd_layout
from tests import helpers
from tests.cases.triton_kernels import assembly, interpret, recorded

leaf = functools.partial(helpers.leaf, dtype=torch.float64)
CPU = torch.device("cpu")
KEYS, TOPK, HEADS = 150, 9, 3


@pytest.mark.parametrize(
    ("total", "share", "size"),
    [
        (8192, 1 / 8, 1024), (8192, 1.0, None), (150, 1.0, None), (150, 1 / 2, 64),
        (150, 1e-3, 64), (64, 0.5, None), (5, 0.1, None), (0, 0.5, None), (129, 0.99, 128),
    ],
)  # fmt: skip
def test_sizes_are_whole_tiles(total, share, size):
    assert sample_size(total, share) == size


@pytest.mark.parametrize(("total", "size"), [(150, 64), (150, 128), (129, 128), (1000, 512)])
def test_every_token_is_equally_likely(total, size):
    counts = torch.zeros(total, dtype=torch.int64)
    for place in range(total):
        sample = sampled_tokens(total, size, torch.tensor(place))
        assert len(sample.tokens.unique()) == size and sample.factor == total / size
        counts += torch.bincount(sample.tokens, minlength=total)
    assert torch.equal(counts, torch.full_like(counts, size))


def test_tiles_hold_neighbours():
    tokens = sampled_tokens(1000, 128, torch.tensor(990)).tokens
    assert ((tokens.view(2, TILE).diff() % 1000) == 1).all() and tokens[0] == 495


def test_wrong_size_is_refused():
    with pytest.raises(ValueError, match="size must be that of sample_size for 150 tokens, got 63"):
        sampled_tokens(150, 63, torch.tensor(0))


def test_tiles_follow_the_generator():
    """What Megatron saves and resumes."""
    state = torch.get_rng_state()
    starts = [draw_sample(1000, 0.3, CPU).tokens.tolist() for _ in range(5)]
    torch.set_rng_state(state)
    assert [draw_sample(1000, 0.3, CPU).tokens.tolist() for _ in range(5)] == starts
    assert starts[0] != starts[1]


def lists():
    indices = torch.full((KEYS, TOPK), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(7)
    for query in range(KEYS):
        chosen = torch.randperm(query + 1, generator=generator)[:TOPK].sort().values
        indices[query, : len(chosen)] = chosen
    return indices


def attentions():
    """The attention of each kind, as ``name -> (run(indexer), its leaves)``."""
    q = leaf(KEYS, HEADS, 24, seed=1)
    kv = leaf(KEYS, 16 + 8, seed=2)
    weights = leaf(HEADS, 16 + 12, 16, seed=3)
    wide = leaf(KEYS, HEADS, 24, seed=4)
    per_head, k_pe = leaf(KEYS, HEADS, 16 + 12, seed=5), leaf(KEYS, 8, seed=6)
    indices = lists()
    bits = key_bits(indices, None, KEYS)
    return {
        "sparse": (
            lambda indexer: sparse_attention(
                wide, kv, indices, softmax_scale=0.3, v_dim=16, indexer=indexer
            ),
            (wide, kv),
        ),
        "absorbed": (
            lambda indexer: absorbed_attention(
                q, kv, weights, indices, softmax_scale=0.3, indexer=indexer
            ),
            (q, kv, weights),
        ),
        "masked": (
            lambda indexer: masked_attention(
                q, per_head, k_pe, bits, softmax_scale=0.3, topk=TOPK, indexer=indexer
            ),
            (q, per_head, k_pe),
        ),
    }


def gradients(name, share, **settings):
    """Return the loss, the gradients of the indexer, and those of the attention."""
    run, leaves = attentions()[name]
    index = leaf(KEYS, 4, 16, seed=11), leaf(KEYS, 16, seed=12), leaf(KEYS, 4, seed=13)
    losses = []
    indexer = IndexerTraining(
        IndexerInputs(*index), bshd_layout(KEYS, 1, CPU), lambda: 0.5, losses.append, share=share,
        **settings,
    )  # fmt: skip
    out = run(indexer).out
    found = torch.autograd.grad(out, (*index, *leaves), torch.ones_like(out))
    return [losses[0], *found[:3]], found[3:]


@pytest.mark.parametrize("selected_only", [False, True])
@pytest.mark.parametrize("name", ["sparse", "absorbed", "masked"])
def test_mean_of_all_starts_is_the_whole_loss(name, selected_only, monkeypatch):
    """Loss and gradients of the indexer; attention's own gradients do not change."""
    if selected_only and name != "sparse":
        pytest.skip("V4's attention only")
    settings = {"selected_only": selected_only}
    whole, others = gradients(name, 1.0, **settings)
    sums = [torch.zeros_like(x) for x in whole]
    for place in range(KEYS):
        monkeypatch.setattr(torch, "randint", lambda *_, place=place, **__: torch.tensor(place))
        some, same = gradients(name, 0.4, **settings)
        assert all(map(torch.equal, same, others))
        for total, x in zip(sums, some, strict=True):
            total += x
    for total, want in zip(sums, whole, strict=True):
        torch.testing.assert_close(total / KEYS, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["sparse", "absorbed", "masked"])
def test_tokens_that_are_not_taken_have_no_gradient(name, monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(70))
    (_, dq, _, dweights), _ = gradients(name, 0.4)
    taken = torch.zeros(KEYS, dtype=torch.bool)
    taken[70 : 70 + TILE] = True
    for x in (dq.flatten(1), dweights):
        assert (x[taken] != 0).any(1).all() and not x[~taken].any()


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.indexer_loss.triton.sample import place_tiles, spread

    for total, size in ((150, 64), (150, 128), (129, 128), (1000, 512)):
        for place in (0, total // 3, total - 1):
            place = torch.tensor(place)
            sample = sampled_tokens(total, size, place)
            assert torch.equal(place_tiles(place, total, size, TILE), sample.tokens)
    for total, place in ((150, 149), (129, 70)):
        sample = sampled_tokens(total, 128, torch.tensor(place))
        tensors = gradients_of(sample, "cpu")
        for given in (tensors, tensors[1:]):
            found = spread(sample.tokens, total, TILE, given)
            for got, want in zip(found, sample.spread(*given), strict=True):
                assert torch.equal(got, want)


def gradients_of(sample, device):
    """Gradients of some tokens, wider and narrower than the block of a program; none is 0."""
    size = len(sample.tokens)
    tensors = [torch.arange(1, size * n + 1, device=device) for n in (1400, 3)]
    return [x.float().view(size, -1, n) for x, n in zip(tensors, (700, 3), strict=True)]


@pytest.mark.parametrize("place", [0, 70, 149])
def test_spread(place):
    sample = sampled_tokens(150, 128, torch.tensor(place))
    given = gradients_of(sample, "cpu")
    for got, x in zip(sample.spread(*given), given, strict=True):
        assert torch.equal(got[sample.tokens], x) and got.count_nonzero() == x.numel()


def test_compiles_once_for_all_sizes(monkeypatch):
    kernels = pytest.importorskip("megatron_dsa.ops.indexer_loss.triton.sample")
    placing, spreading = recorded(monkeypatch, kernels, ["_place_tiles", "_spread"])
    for total, size in ((150, 64), (4096, 512)):
        tokens = kernels.place_tiles(torch.tensor(3), total, size, TILE)
        x = [torch.ones(size, n, dtype=torch.bfloat16) for n in (size, 3)]
        kernels.spread(tokens, total, TILE, x)
    for recorder in (placing, spreading):
        for capability in (80, 90, 100):
            compiled = [assembly(recorder.kernel, *one, capability) for one in recorder.launches]
            assert len({one.hash for one in compiled}) == 1
    kernels.spread(tokens, total, TILE, x[:1])
    assembly(spreading.kernel, *spreading.launches[-1], 90)


@pytest.mark.gpu
def test_places_on_a_gpu():
    for total, size in ((150, 64), (1000, 512), (2**20, 2**17)):
        for place in (0, 70, total - 1):
            place = torch.tensor(place)
            got = sampled_tokens(total, size, place.cuda())
            want = sampled_tokens(total, size, place)
            assert torch.equal(got.tokens.cpu(), want.tokens)
            if total < 2**20:
                found = got.spread(*gradients_of(got, "cuda"))
                for a, b in zip(found, want.spread(*gradients_of(want, "cpu")), strict=True):
                    assert torch.equal(a.cpu(), b)


if __name__ == "__main__":
    main()
