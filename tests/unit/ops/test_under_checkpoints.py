"""Functions without a registered operation: saved tensors are unpacked once, factors are
checked.
"""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_dsa.dsa_kernels as kernels
from megatron_dsa.dsa_kernels import IndexerInputs, IndexerTraining
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras import torch_library as torch_ops
from megatron_dsa.layers.parallel import csa_keys, gather
from megatron_dsa.metrics.quality import captured_mass
from megatron_dsa.ops.common.head_products import head_products
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.rope.api import norm_rope, rotate, rotate_index
from tests.helpers import leaf

T = 16
LAYOUT = bshd_layout(T, 1, torch.device("cpu"))
SCALE = {"softmax_scale": 0.3}


def like(*shape, seed=0):
    return leaf(*shape, seed=seed, dtype=torch.float64)


def tables():
    angle = like(T, 4, seed=9).detach()
    return angle.cos(), angle.sin()


def indices():
    return torch.arange(T)[:, None].sub(torch.arange(5)).clamp_min(-1).int()


def training(*index):
    return IndexerTraining(IndexerInputs(*index), LAYOUT, lambda: 0.7)


INDEX = ((T, 2, 4), (T, 4), (T, 2))


def sparse(q, kv, *index, lists=None, **settings):
    indexer = training(*index) if index else None
    lists = indices() if lists is None else lists
    return kernels.sparse_attention(q, kv, lists, v_dim=4, indexer=indexer, **SCALE | settings).out


def with_lists(q, kv, **settings):
    """Run window and groups of V4's attention, with the groups' keys first."""
    keys = compressed_keys(LAYOUT, 4)
    return sparse(q, kv, lists=KeyLists(LAYOUT, 5, keys), **settings)


def masked(q, kv, k_pe, *index, **settings):
    bits = kernels.key_bits(indices(), None, T)
    indexer = training(*index) if index else None
    return kernels.masked_attention(
        q, kv, k_pe, bits, topk=5, indexer=indexer, **SCALE | settings
    ).out


def absorbed(q, kv, weights, *index, **settings):
    indexer = training(*index) if index else None
    return kernels.absorbed_attention(
        q, kv, weights, indices(), indexer=indexer, **SCALE | settings
    ).out


def gathered(x, weight):
    keys, proxy = gather.finish_with_proxy(gather.start_gather(x, None))
    return gather.gathered_product(keys, proxy, weight)


def ordered(x):
    keys, proxy = gather.finish_with_proxy(gather.start_gather(x, None))
    ours, proxy = csa_keys._InOrder.apply(keys, proxy, torch.arange(T).flip(0))
    return kernels.sparse_attention(
        ours[:, None], ours, indices(), v_dim=4, kv_grad=proxy, **SCALE
    ).out


#: Name -> function and the shapes of its leaves.
CALLS = {
    "rotate": (lambda x: rotate(x, *tables()), [(T, 3, 8)]),
    "rotate back": (lambda x: rotate(x, *tables(), inverse=True), [(T, 3, 8)]),
    "norm_rope": (lambda x: norm_rope(x, *tables(), 1e-6), [(T, 3, 8)]),
    "rotate_index": (lambda x: rotate_index(x, *tables(), rounded=True), [(T, 3, 16)]),
    "head_products": (head_products, [(T, 3, 8), (3, 8, 5)]),
    "dense_attention": (
        lambda *x, **settings: kernels.dense_attention(*x, LAYOUT, **SCALE | settings)[0],
        [(T, 2, 7), (T, 2, 7), (T, 2, 6)],
    ),
    "gathered_latent_attention": (
        lambda *x, **settings: kernels.gathered_latent_attention(*x, LAYOUT, **SCALE | settings)[0],
        [(T, 2, 7), (T, 9), (2, 3, 5), (2, 6, 5)],
    ),
    "gathered_latent_attention, latent_grad": (
        lambda q, latents, proxy, *w: kernels.gathered_latent_attention(
            q, latents.detach(), *w, LAYOUT, latent_grad=proxy, **SCALE
        )[0],
        [(T, 2, 7), (T, 9), (T, 9), (2, 3, 5), (2, 6, 5)],
    ),
    "sparse_attention, indexer": (sparse, [(T, 2, 8), (T, 8), *INDEX]),
    "sparse_attention, kv_grad": (
        lambda q, kv, proxy: sparse(q, kv.detach(), kv_grad=proxy), [(T, 2, 8), (T, 8), (T, 8)]
    ),
    "sparse_attention, KeyLists": (with_lists, [(T, 2, 8), (T + T // 4, 8)]),
    "masked_attention, indexer": (masked, [(T, 2, 7), (T, 2, 9), (T, 2), *INDEX]),
    "absorbed_attention": (absorbed, [(T, 2, 8), (T, 9), (2, 9, 6)]),
    "absorbed_attention, indexer, recompute": (
        lambda *x: absorbed(*x, recompute=True), [(T, 2, 8), (T, 9), (2, 9, 6), *INDEX]
    ),
    "gathered_product": (gathered, [(T, 8), (5, 8)]),
    "keys in order": (ordered, [(T, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_under_checkpoints(name):
    call, shapes = CALLS[name]

    def gradients(run):
        leaves = [like(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        out = run(*leaves)
        out.backward(like(*out.shape, seed=99).detach())
        return [x.grad for x in leaves]

    def offloaded(*leaves):
        with torch.autograd.graph.save_on_cpu():
            return call(*leaves)

    expected = gradients(call)
    assert any(x is not None and x.any() for x in expected)
    for run in (
        offloaded,
        lambda *x: checkpoint(call, *x, use_reentrant=False),
        lambda *x: checkpoint(call, *x, use_reentrant=True),
    ):
        for ours, theirs in zip(gradients(run), expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


FACTORS = {
    name: lambda call=call, shapes=shapes, **settings: call(*(like(*x) for x in shapes), **settings)
    for name, (call, shapes) in CALLS.items()
    if name in ("dense_attention", "gathered_latent_attention", "absorbed_attention")
    or name.endswith("attention, indexer")
} | {
    "sparse_attention of torch_ops": lambda **settings: torch_ops.sparse_attention(
        like(T, 2, 8), like(T, 8), indices(), v_dim=4, **settings
    ),
    "masked_attention of torch_ops": lambda **settings: torch_ops.masked_attention(
        like(T, 2, 7), like(T, 2, 9), like(T, 2), kernels.key_bits(indices(), None, T), **settings
    ),
    "dense_indexer_loss": lambda **settings: kernels.dense_indexer_loss(
        IndexerInputs(*(like(*x) for x in INDEX)), like(T, 2, 7), like(T, 1, 7), LAYOUT, **settings
    ),
    "dense_indexer_loss of torch_ops": lambda **settings: torch_ops.dense_indexer_loss(
        *(like(*x) for x in INDEX), like(T, 2, 7), like(T, 1, 7), **settings
    ),
    "captured_mass": lambda **settings: captured_mass(
        like(T, 2, 8), like(T, 8), indices(), like(T, 2), LAYOUT, **settings
    ),
}  # fmt: skip


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_on_scores(name, scale):
    with pytest.raises(ConfigError, match=r"^softmax_scale must be positive and finite, got"):
        FACTORS[name](softmax_scale=scale)


def test_a_factor_that_is_fine():
    for call in FACTORS.values():
        call(softmax_scale=0.3)
