"""Index queries that the sparse loss recomputes from latents, against existing queries."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    absorbed_attention,
    indexer_topk,
    key_bits,
    masked_attention,
    sparse_attention,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.training import LatentIndexerInputs, LatentQueries
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.rope.api import rotate_index
from tests.helpers import relative_error

TOKENS, LATENT, HEADS, DIM, ROPE, TOPK = 29, 12, 3, 8, 4, 6
#: A block of queries and of their gradients, of one token in float64, times two.
ONE = 2 * HEADS * DIM * 16


def normal(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def tensors(dtype):
    """Return an indexer's leaves: query weight, keys, head weights; latents; rope."""
    latent = normal(TOKENS, LATENT, seed=1, dtype=dtype)
    leaves = [
        normal(HEADS * DIM, LATENT, seed=2, dtype=dtype) * 0.3,
        normal(TOKENS, DIM, seed=3, dtype=dtype),
        normal(TOKENS, HEADS, seed=4, dtype=dtype) * 0.2,
    ]
    angles = normal(TOKENS, ROPE // 2, seed=5, dtype=torch.promote_types(dtype, torch.float32))
    # YaRN scales both, so the rotation back is no inverse.
    return latent, [x.requires_grad_() for x in leaves], (1.3 * angles.cos(), 1.3 * angles.sin())


def indexers(dtype, policy=Policy()):
    """Return one indexer with queries and one with latents, and both leaves."""
    latent, leaves, rope = tensors(dtype)
    others = [x.detach().clone().requires_grad_() for x in leaves]
    product = torch.nn.functional.linear(latent, leaves[0]).view(TOKENS, HEADS, DIM)
    q = rotate_index(product, *rope, neighbours=False)
    whole = IndexerInputs(q, leaves[1], leaves[2])
    latents = LatentQueries(latent, others[0], *rope, HEADS, False, True, policy)
    return (whole, leaves), (LatentIndexerInputs(latents, *others[1:]), others)


def attend(kind, indices, length, training, dtype, policy):
    """Run an attention that trains the indexer, forward and backward."""
    q, kv = normal(TOKENS, 2, 10, seed=6, dtype=dtype), normal(TOKENS, 10, seed=7, dtype=dtype)
    settings = {"softmax_scale": 0.3, "indexer": training, "policy": policy}
    if kind == "absorbed":
        weights = normal(2, 11, 6, seed=8, dtype=dtype)
        out = absorbed_attention(q, kv, weights, indices, topk_length=length, **settings).out
    elif kind == "sparse":
        out = sparse_attention(q, kv, indices, v_dim=6, topk_length=length, **settings).out
    else:
        kv = normal(TOKENS, 2, 11, seed=9, dtype=dtype)
        k_pe = normal(TOKENS, 4, seed=10, dtype=dtype)
        bits = key_bits(indices, length, TOKENS)
        out = masked_attention(q, kv, k_pe, bits, topk=TOPK, **settings).out
    out.sum().backward()


@pytest.mark.parametrize("workspace", [ONE, 5 * ONE, 2**28])
@pytest.mark.parametrize("kind", ["absorbed", "masked", "sparse"])
def test_gradients_are_those_of_queries_that_exist(kind, workspace):
    layout, policy = bshd_layout(TOKENS, 1, torch.device("cpu")), Policy(workspace_bytes=workspace)
    found, losses = [], []
    for inputs, leaves in indexers(torch.float64, policy):
        indices, length = indexer_topk(inputs.with_queries(), layout, TOPK)
        training = IndexerTraining(inputs, layout, lambda: torch.tensor(0.7), losses.append)
        attend(kind, indices, length, training, torch.float64, policy)
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert theirs.norm() > 0
        assert relative_error(ours, theirs) < 1e-12
    assert relative_error(losses[1], losses[0]) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1.5e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("workspace", [ONE, 2**28])
def test_gradients_against_float64(dtype, tolerance, workspace):
    """Without the loss's factor, fp16 has four bits of these gradients."""
    layout, policy = bshd_layout(TOKENS, 1, torch.device("cpu")), Policy(workspace_bytes=workspace)
    scale = 2.0**-4 if dtype != torch.float16 else 2.0**14
    lists = indexer_topk(indexers(dtype)[1][0].with_queries(), layout, TOPK)

    def run(inputs, kind):
        training = IndexerTraining(inputs, layout, lambda: torch.tensor(scale, dtype=kind).double())
        attend("absorbed", *lists, training, kind, policy)

    (_, (inputs, leaves)) = indexers(dtype, policy)
    if dtype == torch.float16:
        leaves[2].data.mul_(2.0**-12)
    run(inputs, dtype)
    x = inputs.queries
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    wide = LatentQueries(
        x.latent.double(), doubles[0], x.cos.double(), x.sin.double(), HEADS, False, True, policy
    )
    run(LatentIndexerInputs(wide, *doubles[1:]), torch.float64)
    for ours, theirs in zip(leaves, doubles, strict=True):
        assert ours.grad.dtype == dtype
        assert relative_error(ours.grad, theirs.grad) < tolerance


@pytest.mark.parametrize(("workspace", "longest"), [(ONE, 1), (7 * ONE, 7), (2**28, TOKENS)])
def test_blocks_fit_half_of_the_workspace(workspace, longest, monkeypatch):
    made = []
    compute = LatentQueries.compute

    def recorded(self, tokens=slice(None)):
        q = compute(self, tokens)
        made.append(len(q))
        return q

    layout, policy = bshd_layout(TOKENS, 1, torch.device("cpu")), Policy(workspace_bytes=workspace)
    _, (inputs, leaves) = indexers(torch.float64, policy)
    lists = indexer_topk(inputs.with_queries(), layout, TOPK)
    monkeypatch.setattr(LatentQueries, "compute", recorded)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(
            "sparse", *lists, IndexerTraining(inputs, layout, lambda: 1.0), torch.float64, policy
        )
    assert max(made) <= longest and sum(made) == TOKENS
    assert len(made) == -(-TOKENS // longest)
    assert kept and all(x.shape != (TOKENS, HEADS, DIM) for x in kept)
    assert leaves[0].grad is not None


def test_queries_are_computed_again_alike():
    _, (inputs, _) = indexers(torch.bfloat16)
    first, again = inputs.with_queries(), inputs.with_tensors(inputs.tensors()).with_queries()
    assert again is not first and torch.equal(again.q, first.q)
    assert not again.q.requires_grad and not again.weights.requires_grad


def test_the_way_back_is_the_gradient():
    latent, (weight, *_), rope = tensors(torch.float64)
    x = torch.nn.functional.linear(latent, weight).view(TOKENS, HEADS, DIM).detach()
    dy = normal(TOKENS, HEADS, DIM, seed=12, dtype=torch.float64)
    for neighbours in (False, True):
        for transform in (False, True):
            kind = {"neighbours": neighbours, "transform": transform}
            leaf = x.clone().requires_grad_()
            (want,) = torch.autograd.grad(rotate_index(leaf, *rope, **kind), leaf, dy)
            got = rotate_index(dy, *rope, transposed=True, **kind)
            assert not got.requires_grad and relative_error(got, want) < 1e-14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": lambda x: x[None]}, "inputs.latent must"),
        ({"weight": lambda x: x[:, :5]}, "inputs.weight must"),
        ({"weight": lambda x: x.float()}, "inputs.weight must"),
        ({"latent": lambda x: x[:7]}, "inputs.weights must"),
        ({"heads": lambda _: 2}, "inputs.k must"),
    ],
)
def test_wrong_tensors(changes, message):
    _, (inputs, _) = indexers(torch.float64)
    parts = SimpleNamespace(**vars(inputs.queries))
    for name, change in changes.items():
        setattr(parts, name, change(getattr(parts, name)))
    layout = bshd_layout(TOKENS, 1, torch.device("cpu"))
    wrong = LatentIndexerInputs(LatentQueries(**vars(parts)), inputs.k, inputs.weights)
    lists = indexer_topk(inputs.with_queries(), layout, TOPK)
    training = IndexerTraining(wrong, layout, lambda: 1.0)
    with pytest.raises(ConfigError, match=message):
        attend("sparse", *lists, training, torch.float64, Policy())
