"""Calls of the dense indexer loss within its kernels' limits, and their comparison with float64."""

import dataclasses

import torch

from megatron_dsa.dsa_kernels import ExpandedKeys, IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.indexer_loss.spec import DenseLossInputs
from megatron_dsa.testing.cases import visible_keys
from megatron_dsa.testing.comparison import Comparison
from tests.helpers import leaf

MODULE = "megatron_dsa.ops.indexer_loss.triton.dense"
HOPPER = "megatron_dsa.ops.indexer_loss.tilelang.dense"
SCALE = 0.11  # not 1, so that a scale applied twice is noticed


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads and dims: ``own`` dims per head of a key, computed from ``rank`` latents if any;
    ``value`` dims follow in an expanded key.
    """

    index_heads: int = 5
    index_dim: int = 16
    heads: int = 3
    dim: int = 80
    own: int = 64
    rank: int = 24
    value: int = 8


def make(layout, shape, dtype, keys, relu=True):
    """Return inputs of the largest workspace, with scores of deviation 1."""
    device, rows, slots = layout.start.device, layout.num_queries, layout.num_keys

    def draw(*sizes, seed, scale=1.0):
        return leaf(*sizes, seed=seed, device=device, dtype=dtype, scale=scale)

    inputs = IndexerInputs(
        draw(rows, shape.index_heads, shape.index_dim, seed=1),
        draw(slots, shape.index_dim, seed=2),
        draw(rows, shape.index_heads, seed=3, scale=(shape.index_heads * shape.index_dim) ** -0.5),
        relu,
    )
    if keys == "latent":
        shared = shape.dim - shape.own
        latents = draw(slots, shape.rank + shared, seed=5)
        w_uk = draw(shape.heads, shape.own, shape.rank, seed=6, scale=shape.rank**-0.5)
        k = LatentKeys(latents, w_uk).detach()
    elif keys == "expanded":
        kv = draw(slots, shape.heads, shape.own + shape.value, seed=5)
        k = ExpandedKeys(kv, draw(slots, shape.dim - shape.own, seed=6), shape.value).detach()
    else:
        k = draw(slots, 1 if keys == "one" else shape.heads, shape.dim, seed=5).detach()
    q = draw(rows, shape.heads, shape.dim, seed=4).detach()
    return DenseLossInputs(inputs.detach(), layout, q, k, SCALE, None, 2**28)


def computed(arguments, run=None, name="triton"):
    """Return value and gradients of ``run``, by default of implementation ``name``."""
    if run is not None:
        value, gradients = run(arguments)
        return value, *gradients
    tensors = (arguments.indexer.q, arguments.indexer.k, arguments.indexer.weights)
    inputs = IndexerInputs(*(x.detach().requires_grad_() for x in tensors), arguments.indexer.relu)
    reset_report()
    value = dense_indexer_loss(
        inputs, arguments.q, arguments.k, arguments.layout, softmax_scale=SCALE,
        other_lse=arguments.other_lse, lse=arguments.lse, head_group=arguments.head_group,
        policy=Policy(
            workspace_bytes=arguments.workspace_bytes, named=(("dense_indexer_loss", name),)
        ),
    )  # fmt: skip
    assert report()["dense_indexer_loss"] == {name: 1}
    value.backward()
    return value.detach(), inputs.q.grad, inputs.k.grad, inputs.weights.grad


def check(got, want, of_value, of_gradients):
    """Compare value and gradients with an ``ExpectedLoss``, each with its tolerance."""
    found = Comparison(of_gradients, {"loss": of_value})
    want.compare(found, *got)
    assert not found.wrong()


def with_others(inputs):
    """Add other mass that differs by head: none for some queries, only that for others."""
    rows, heads = inputs.q.shape[:2]
    dtype = accumulation_dtype(inputs.q.dtype)
    other = leaf(rows, heads, seed=8, device=inputs.q.device, dtype=dtype).detach() * 3
    other[::5, -1] = float("-inf")
    other[7] = float("-inf")
    other[30] = 1e5
    return dataclasses.replace(inputs, other_lse=other)


def with_lse(inputs, anything=float("nan")):
    """Add given log-sum-exps, arbitrary for queries without keys."""
    k = inputs.k if isinstance(inputs.k, torch.Tensor) else inputs.k.expanded()
    mask = visible_keys(inputs.layout)
    logits = torch.einsum("qhd,khd->qhk", inputs.q.double(), k.double()) * SCALE
    lse = logits.masked_fill(~mask[:, None], float("-inf")).logsumexp(-1)
    lse = lse.to(accumulation_dtype(inputs.q.dtype))
    lse[~mask.any(-1)] = anything
    return dataclasses.replace(inputs, lse=lse)


def without_relu(inputs):
    """Drop the relu."""
    return dataclasses.replace(inputs, indexer=dataclasses.replace(inputs.indexer, relu=False))


def with_nan(inputs):
    """Set queries without keys, and keys that no query sees, to NaN."""
    layout, x = inputs.layout, inputs.indexer.detach()
    unseen_rows, unseen_keys = layout.start == layout.end, ~visible_keys(layout).any(0)
    assert unseen_rows.any() and unseen_keys.any()

    def spoilt(tensor, rows):
        return tensor.clone().index_fill_(0, rows.nonzero().squeeze(1), float("nan"))

    k = inputs.k
    if isinstance(k, LatentKeys):
        k = LatentKeys(spoilt(k.latents, unseen_keys), k.w_uk)
    elif isinstance(k, ExpandedKeys):
        k = ExpandedKeys(spoilt(k.kv, unseen_keys), spoilt(k.k_pe, unseen_keys), k.v_dim)
    else:
        k = spoilt(k, unseen_keys)
    return dataclasses.replace(
        inputs,
        indexer=IndexerInputs(
            spoilt(x.q, unseen_rows), spoilt(x.k, unseen_keys), spoilt(x.weights, unseen_rows),
            x.relu,
        ),
        q=spoilt(inputs.q, unseen_rows),
        k=k,
    )  # fmt: skip
