"""The indexer's loss on a share of the query tokens: unbiased, in every attention."""

import functools
from dataclasses import replace

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    ExpandedKeys,
    IndexerInputs,
    IndexerTraining,
    LatentKeys,
    absorbed_attention,
    dense_indexer_loss,
    key_bits,
    masked_attention,
    sparse_attention,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.sample import TILE, draw_sample, sample_size, sampled_tokens
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.pools import KeyPools
from tests import helpers
from tests.cases.triton_kernels import assembly, interpret, recorded

leaf = functools.partial(helpers.leaf, dtype=torch.float64)
CPU = torch.device("cpu")
KEYS, TOPK, HEADS = 150, 9, 4


@pytest.mark.parametrize(
    ("total", "share", "size"),
    [
        (8192, 1 / 8, 1024), (8192, 1.0, None), (150, 1.0, None), (150, 1 / 2, 64),
        (150, 1e-3, 64), (64, 0.5, None), (5, 0.1, None), (0, 0.5, None), (129, 0.99, 128),
        (512, 0.99, 448),
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
    """Megatron saves and resumes it."""
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


def v4_lists():
    """Return lists of a window of 5 and selected keys of 4 positions each."""
    layout = bshd_layout(KEYS, 1, CPU)
    keys = compressed_keys(layout, 4, True)
    selected = keys.layout.end[:, None] - 1 - 2 * torch.arange(TOPK, dtype=torch.int32)
    selected.masked_fill_(selected < 0, -1)
    return KeyLists(layout, 5, keys, selected, (selected >= 0).sum(1).int())


def pooled_lists():
    """Return pools of 4 tokens, lists of the latest two and of the tail, and their lengths."""
    pools = KeyPools.of(bshd_layout(KEYS, 1, CPU), 4)
    end = pools.keys.layout.end[:, None]
    selected = torch.arange(2, dtype=torch.int32) + (end - 2).clamp_min(0)
    selected.masked_fill_(selected >= end, -1)
    return pools, *pools.expand(selected, (selected >= 0).sum(1, dtype=torch.int32))


def attentions():
    """Return each kind of attention, as ``name -> (run(indexer), its leaves)``."""
    q = leaf(KEYS, HEADS, 24, seed=1)
    kv = leaf(KEYS, 16 + 8, seed=2)
    weights = leaf(HEADS, 16 + 12, 16, seed=3)
    wide = leaf(KEYS, HEADS, 24, seed=4)
    per_head, k_pe = leaf(KEYS, HEADS, 16 + 12, seed=5), leaf(KEYS, 8, seed=6)
    indices, v4, sink = lists(), v4_lists(), leaf(HEADS, seed=7)
    of_v4 = leaf(v4.offset + KEYS, 16 + 8, seed=8)
    bits = key_bits(indices, None, KEYS)
    pools, tokens, length = pooled_lists()
    pool_bits = key_bits(tokens, length, KEYS)
    return {
        "pools": (
            lambda indexer: absorbed_attention(
                q,
                kv,
                weights,
                tokens,
                topk_length=length,
                softmax_scale=0.3,
                indexer=replace(indexer, layout=pools.keys.layout, pools=pools),
            ),
            (q, kv, weights),
        ),
        "pools, masked": (
            lambda indexer: masked_attention(
                q,
                per_head,
                k_pe,
                pool_bits,
                softmax_scale=0.3,
                topk=tokens.shape[1],
                indexer=replace(indexer, layout=pools.keys.layout, pools=pools),
            ),
            (q, per_head, k_pe),
        ),
        "sparse": (
            lambda indexer: sparse_attention(
                wide, kv, indices, softmax_scale=0.3, v_dim=16, indexer=indexer
            ),
            (wide, kv),
        ),
        "lists": (
            lambda indexer: sparse_attention(
                wide, of_v4, v4, softmax_scale=0.3, v_dim=16, attn_sink=sink, indexer=indexer
            ),
            (wide, of_v4, sink),
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
    """Return the loss, and gradients of indexer and attention."""
    run, leaves = attentions()[name]
    layout = v4_lists().compressed.layout if name == "lists" else bshd_layout(KEYS, 1, CPU)
    rows = KEYS // 4 if name.startswith("pools") else layout.num_keys
    index = leaf(KEYS, 4, 16, seed=11), leaf(rows, 16, seed=12), leaf(KEYS, 4, seed=13)
    losses = []
    indexer = IndexerTraining(
        IndexerInputs(*index), layout, lambda: 0.5, losses.append, share=share, **settings
    )
    out = run(indexer).out
    found = torch.autograd.grad(out, (*index, *leaves), torch.ones_like(out))
    return [losses[0], *found[:3]], found[3:]


def means(run, monkeypatch):
    """Return mean results of ``run`` over offsets that cover all tokens equally."""
    sums, places = None, range(0, KEYS, 2)
    for place in places:
        monkeypatch.setattr(torch, "randint", lambda *_, place=place, **__: torch.tensor(place))
        found = run()
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
    return [x / len(places) for x in sums]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sparse", {}), ("sparse", {"selected_only": True}), ("lists", {}), ("absorbed", {}),
        ("masked", {}), ("pools", {}), ("pools, masked", {}),
    ],
)  # fmt: skip
def test_mean_of_all_places_is_the_whole_loss(name, settings, monkeypatch):
    """Attention's gradients must not change."""
    whole, others = gradients(name, 1.0, **settings)

    def some():
        found, own = gradients(name, 0.4, **settings)
        assert all(map(torch.equal, own, others))
        return found

    same(means(some, monkeypatch), whole)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", ["absorbed", "masked"])
def test_mean_of_the_gradients_taught_by_some_heads(name, parts, monkeypatch):
    """Gradients equal those of all heads and tokens; the convex loss is larger."""
    whole, _ = gradients(name, 1.0)
    found = means(lambda: gradients(name, 0.4, head_parts=parts)[0], monkeypatch)
    same(found[1:], whole[1:])
    assert found[0] > 1.001 * whole[0]


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("sparse", 2, "indexer.head_parts must be 1"), ("lists", 2, "indexer.head_parts must be 1"),
        ("absorbed", 8, "indexer.head_parts must divide the 4 heads on each of 1 ranks, got 8"),
        ("masked", 8, "indexer.head_parts must divide the 4 heads on each of 1 ranks, got 8"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_the_heads(name, parts, message):
    with pytest.raises(ConfigError, match=message):
        gradients(name, 0.4, head_parts=parts)


@pytest.mark.parametrize("name", ["sparse", "lists", "absorbed", "masked"])
def test_tokens_that_are_not_taken_have_no_gradient(name, monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(70))
    (_, dq, _, dweights), _ = gradients(name, 0.4)
    taken = torch.zeros(KEYS, dtype=torch.bool)
    taken[70 : 70 + TILE] = True
    for x in (dq.flatten(1), dweights):
        assert (x[taken] != 0).any(1).all() and not x[~taken].any()


def dense_teachers():
    """Return queries and keys of each kind of teacher."""
    q, latents, w_uk = (
        leaf(KEYS, HEADS, 24, seed=31),
        leaf(KEYS, 16 + 8, seed=32),
        leaf(HEADS, 16, 16, seed=33),
    )
    return {
        "latent": (q, LatentKeys(latents, w_uk)),
        "expanded": (
            q,
            ExpandedKeys(leaf(KEYS, HEADS, 16 + 12, seed=34), leaf(KEYS, 8, seed=35), 12),
        ),
        "every head": (q, leaf(KEYS, HEADS, 24, seed=36)),
        "one head": (q, leaf(KEYS, 1, 24, seed=37)),
    }


#: Layouts of equally many query tokens: one sequence, three interleaved, packed with padding,
#: compressed keys.
LAYOUTS = {
    "one": lambda: bshd_layout(KEYS, 1, CPU),
    "three": lambda: bshd_layout(KEYS // 3, 3, CPU),
    "packed": lambda: packed_layout(
        torch.tensor([0, 3, 60, 131], dtype=torch.int32), KEYS, 71,
        torch.tensor([0, 8, 66, 140], dtype=torch.int32),
    ),
    "compressed": lambda: compressed_keys(bshd_layout(KEYS, 1, CPU), 4, True).layout,
}  # fmt: skip


def dense_gradients(layout, q, k, share, parts, **settings):
    rows = layout.num_keys
    index = leaf(KEYS, 4, 16, seed=11), leaf(rows, 16, seed=12), leaf(KEYS, 4, seed=13)
    loss = dense_indexer_loss(
        IndexerInputs(*index), q, k, layout, softmax_scale=0.3,
        sample=draw_sample(KEYS, share, CPU, parts=parts), **settings,
    )  # fmt: skip
    return [loss.detach(), *torch.autograd.grad(loss, index)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", ["one", "three", "packed"])
def test_mean_of_the_dense_loss_in_every_layout(layout, parts, monkeypatch):
    q, k = dense_teachers()["every head"]
    layout = LAYOUTS[layout]()
    whole = dense_gradients(layout, q, k, 1.0, 1)
    found = means(lambda: dense_gradients(layout, q, k, 0.4, parts), monkeypatch)
    same(found[parts > 1 :], whole[parts > 1 :])


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("keys", ["latent", "expanded", "one head"])
def test_mean_of_the_dense_loss_of_every_teacher(keys, parts, monkeypatch):
    q, k = dense_teachers()[keys]
    layout = LAYOUTS["one"]()
    whole = dense_gradients(layout, q, k, 1.0, 1)
    found = means(lambda: dense_gradients(layout, q, k, 0.4, parts), monkeypatch)
    same(found[parts > 1 :], whole[parts > 1 :])


def test_mean_of_the_dense_loss_beside_other_keys(monkeypatch):
    layout = LAYOUTS["compressed"]()
    q, k = leaf(KEYS, HEADS, 24, seed=38), leaf(layout.num_keys, 1, 24, seed=39)
    other = leaf(KEYS, HEADS, seed=9).detach()
    whole = dense_gradients(layout, q, k, 1.0, 1, other_lse=other)
    found = means(lambda: dense_gradients(layout, q, k, 0.4, 1, other_lse=other), monkeypatch)
    same(found, whole)


@pytest.mark.parametrize(
    ("total", "parts", "heads", "wrong"),
    [
        (140, 1, HEADS, "sample must be of the 150 query tokens, got one of 140"),
        (150, 8, HEADS, "sample must have parts that divide the 4 heads, got 8"),
    ],
)
def test_wrong_samples_of_the_dense_loss(total, parts, heads, wrong):
    q, k = dense_teachers()["every head"]
    index = leaf(KEYS, 4, 16, seed=40), leaf(KEYS, 16, seed=41), leaf(KEYS, 4, seed=42)
    sample = draw_sample(total, 0.4, CPU, parts=parts)
    with pytest.raises(ConfigError, match=wrong):
        dense_indexer_loss(
            IndexerInputs(*index), q, k, LAYOUTS["one"](), softmax_scale=0.3, sample=sample
        )


def on_gpu(kind, dtype):
    """Return the training of a V3.2-sized indexer (64 heads of 128) on a sample of 1000 tokens."""
    tokens, heads, topk = 1000, 16, 128

    def draw(*shape, seed, scale=1.0):
        return leaf(*shape, seed=seed, scale=scale).detach().to("cuda", torch.bfloat16).to(dtype)

    index = [draw(tokens, 64, 128, seed=1), draw(tokens, 128, seed=2), draw(tokens, 64, seed=3)]
    index = [x.requires_grad_() for x in index]
    layout = bshd_layout(tokens, 1, torch.device("cuda", 0))
    score = torch.rand(
        tokens, tokens, generator=torch.Generator("cuda").manual_seed(4), device="cuda"
    )
    best = score.tril().topk(topk, 1)
    indices = torch.where(best.values > 0, best.indices, tokens).sort(1).values
    indices = torch.where(indices == tokens, -1, indices).int()
    q, k_pe = draw(tokens, heads, 192, seed=5), draw(tokens, 64, seed=6)
    latents, w_uk = draw(tokens, 512, seed=7), draw(heads, 256, 512, seed=8, scale=512**-0.5)
    kv = torch.einsum("tr,hdr->thd", latents, w_uk)
    return index, layout, indices, q, k_pe, latents, w_uk, kv


def trained_on_gpu(kind, dtype, policy, parts):
    index, layout, indices, q, k_pe, latents, weights, kv = on_gpu(kind, dtype)
    inputs, scale, losses = IndexerInputs(*index), 192**-0.5, []
    if kind.startswith("dense"):
        keys = {
            "dense latent": LatentKeys(torch.cat([latents, k_pe], 1), weights[:, :128]),
            "dense expanded": ExpandedKeys(kv, k_pe, 128),
        }[kind]
        sample = draw_sample(len(q), 0.3, q.device, parts=parts)
        loss = dense_indexer_loss(
            inputs, q, keys, layout, softmax_scale=scale, sample=sample, policy=policy
        )
        return [loss.detach(), *torch.autograd.grad(loss, index)]
    indexer = IndexerTraining(
        inputs, layout, lambda: 1.0, losses.append, share=0.3, head_parts=parts
    )
    q.requires_grad_()
    if kind == "masked":
        bits = key_bits(indices, None, len(q))
        out = masked_attention(
            q, kv, k_pe, bits, softmax_scale=scale, topk=indices.shape[1], indexer=indexer,
            policy=policy,
        ).out  # fmt: skip
    else:
        out = absorbed_attention(
            q, torch.cat([latents, k_pe], 1), weights, indices, softmax_scale=scale,
            in_order=True, indexer=indexer, policy=policy,
        ).out  # fmt: skip
    found = torch.autograd.grad(out, index, torch.ones_like(out))
    return [losses[0], *found]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", ["masked", "absorbed", "dense latent", "dense expanded"])
def test_fused_kernels_train_on_a_sample(kind, parts, monkeypatch):
    place = torch.tensor(777, device="cuda")
    monkeypatch.setattr(torch, "randint", lambda *_, **__: place)
    got = trained_on_gpu(kind, torch.bfloat16, Policy(fused=True), parts)
    want = trained_on_gpu(kind, torch.float64, Policy(fused=False), parts)
    for name, a, b in zip(("loss", "q", "k", "weights"), got, want, strict=True):
        assert helpers.relative_error(a, b) < 1.5e-2, name


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.indexer_loss.triton.sample import spread, tile_tokens

    for total, size in ((150, 64), (150, 128), (129, 128), (1000, 512)):
        for place in (0, total // 3, total - 1):
            for parts in (1, 4):
                want = sampled_tokens(total, size, torch.tensor(place), parts).tokens
                got = tile_tokens(torch.tensor(place), total, size, TILE, parts)
                assert torch.equal(got, want)
    for total, size, place in ((150, 128, 149), (129, 128, 70), (1000, 192, 0), (1000, 192, 1)):
        sample = sampled_tokens(total, size, torch.tensor(place), 4)
        tensors = gradients_of(sample, "cpu")
        for given in (tensors, tensors[1:]):
            found = spread(sample.tokens, total, TILE, sample.parts, given)
            for got, want in zip(found, sample.spread(*given), strict=True):
                assert torch.equal(got, want)


def gradients_of(sample, device):
    """Return gradients of some tokens, wider and narrower than a program's block; none is 0."""
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
    placing, spreading = recorded(monkeypatch, kernels, ["_tile_tokens", "_spread"])
    for total, size in ((150, 64), (4096, 512)):
        tokens = kernels.tile_tokens(torch.tensor(3), total, size, TILE)
        x = [torch.ones(size, n, dtype=torch.bfloat16) for n in (size, 3)]
        kernels.spread(tokens, total, TILE, 1, x)
    for recorder in (placing, spreading):
        for capability in (80, 90, 100):
            compiled = [assembly(recorder.kernel, *one, capability) for one in recorder.launches]
            assert len({one.hash for one in compiled}) == 1
    kernels.spread(tokens, total, TILE, 1, x[:1])
    assembly(spreading.kernel, *spreading.launches[-1], 90)


@pytest.mark.gpu
def test_places_on_a_gpu():
    for total, size in ((150, 64), (1000, 512), (2**20, 2**17)):
        for place in (0, 70, total - 1):
            for parts in (1, 4):
                got = sampled_tokens(total, size, torch.tensor(place, device="cuda"), parts)
                want = sampled_tokens(total, size, torch.tensor(place), parts)
                assert torch.equal(got.tokens.cpu(), want.tokens)
                if total < 2**20:
                    found = got.spread(*gradients_of(got, "cuda"))
                    for a, b in zip(found, want.spread(*gradients_of(want, "cpu")), strict=True):
                        assert torch.equal(a.cpu(), b)


if __name__ == "__main__":
    main()
