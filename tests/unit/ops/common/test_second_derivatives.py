"""Second derivatives: right for ``rotate``, rejected everywhere else."""

import ast
import pathlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_dsa
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    LatentKeys,
    absorbed_attention,
    dense_attention,
    dense_indexer_loss,
    key_bits,
    masked_attention,
    sparse_attention,
    sparse_indexer_loss,
)
from megatron_dsa.layers.parallel.gather import gathered_product
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.dense_attention.blocks import torch_kernel
from megatron_dsa.ops.dense_attention.ring import (
    ContiguousShard,
    attention,
    gathered_latent_attention,
)
from megatron_dsa.ops.dense_attention.ring.exchange import Ring
from megatron_dsa.ops.hyper_connections.api import (
    Connection,
    read_head,
    read_streams,
    write_streams,
)
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.rope.api import norm_rope, rotate
from tests.helpers import leaf, relative_error

TOKENS, HEADS, DIM = 12, 2, 6
LAYOUT = bshd_layout(TOKENS, 1, torch.device("cpu"))


def double(*shape, seed):
    return leaf(*shape, seed=seed, dtype=torch.float64)


def tables():
    angle = double(TOKENS, 2, seed=7).detach()
    return angle.cos(), angle.sin()


def index_inputs():
    return double(TOKENS, HEADS, 4, seed=4), double(TOKENS, 4, seed=5), double(TOKENS, 2, seed=6)


def selection(width=4):
    last = torch.arange(TOKENS, dtype=torch.int32)[:, None]
    return (last - torch.arange(width, dtype=torch.int32)).clamp_min(-1)


def bits():
    return key_bits(selection(), None, TOKENS)


def written(x, connection):
    read = read_streams(x, connection, torch.ones(4))
    return write_streams(read.normed.sin(), read)


def trained(inputs):
    return IndexerTraining(IndexerInputs(*inputs), LAYOUT, lambda: 0.5)


def attend(q, kv, sink=None, indexer=None):
    return sparse_attention(
        q, kv, selection(), softmax_scale=0.3, v_dim=4, attn_sink=sink, indexer=indexer
    ).out


def rows():
    return ContiguousShard(cp=1, rank=0, batch=1, length=TOKENS)


class Echo:
    """A ring whose neighbours return what they get."""

    def start(self, send, receive):
        receive.copy_(send)

    def wait(self):
        pass


def over_two_ranks(q, k, v):
    last = ContiguousShard(cp=2, rank=1, batch=1, length=TOKENS)
    settings = (last, Ring(Echo, 2, 1), torch_kernel(10**6), 0.3)
    return attention._KeyValueAttention.apply(q, k, v, *settings)[0]


Q, KV = (TOKENS, HEADS, DIM), (TOKENS, DIM)
#: Leaves, and a public operation of them.
OPERATIONS = {
    "sparse_attention": (lambda: [double(*Q, seed=1), double(*KV, seed=2)], attend),
    "sparse_attention, sink": (
        lambda: [double(*Q, seed=1), double(*KV, seed=2), double(HEADS, seed=3)], attend,
    ),
    "sparse_attention, indexer": (
        lambda: [double(*Q, seed=1), double(*KV, seed=2), *index_inputs()],
        lambda q, kv, *inputs: attend(q, kv, indexer=trained(inputs)),
    ),
    "absorbed_attention": (
        lambda: [double(TOKENS, HEADS, 5, seed=1), double(*KV, seed=2),
                 double(HEADS, 6, DIM - 2, seed=3)],
        lambda *x: absorbed_attention(*x, selection(), softmax_scale=0.3).out,
    ),
    "masked_attention": (
        lambda: [double(*Q, seed=1), double(TOKENS, HEADS, 7, seed=2), double(TOKENS, 2, seed=3)],
        lambda *x: masked_attention(*x, bits(), softmax_scale=0.3).out,
    ),
    "masked_attention, indexer": (
        lambda: [double(*Q, seed=1), double(TOKENS, HEADS, 7, seed=2), double(TOKENS, 2, seed=3),
                 *index_inputs()],
        lambda q, kv, k_pe, *inputs: masked_attention(
            q, kv, k_pe, bits(), softmax_scale=0.3, topk=4, indexer=trained(inputs)
        ).out,
    ),
    "sparse_indexer_loss": (
        lambda: list(index_inputs()),
        lambda *x: sparse_indexer_loss(
            IndexerInputs(*x), selection(), double(TOKENS, 4, seed=8).detach().square(), LAYOUT
        ),
    ),
    "dense_indexer_loss": (
        lambda: list(index_inputs()),
        lambda *x: dense_indexer_loss(
            IndexerInputs(*x), double(*Q, seed=1), double(TOKENS, 1, DIM, seed=2), LAYOUT,
            softmax_scale=0.3,
        ),
    ),
    "dense_indexer_loss, latents": (
        lambda: list(index_inputs()),
        lambda *x: dense_indexer_loss(
            IndexerInputs(*x), double(*Q, seed=1),
            LatentKeys(double(TOKENS, 5, seed=2), double(HEADS, DIM - 2, 3, seed=3)), LAYOUT,
            softmax_scale=0.3,
        ),
    ),
    "dense_attention": (
        lambda: [double(*Q, seed=1), double(*Q, seed=2), double(TOKENS, HEADS, 3, seed=3)],
        lambda q, k, v: dense_attention(q, k, v, LAYOUT, softmax_scale=0.3)[0],
    ),
    "ring_attention": (
        lambda: [double(*Q, seed=1), double(*Q, seed=2), double(TOKENS, HEADS, 3, seed=3)],
        over_two_ranks,
    ),
    "gathered_latent_attention": (
        lambda: [double(*Q, seed=1), double(TOKENS, 5, seed=2),
                 double(HEADS, DIM - 2, 3, seed=3), double(HEADS, 3, 3, seed=4)],
        lambda *x: gathered_latent_attention(*x, rows(), 0.3)[0],
    ),
    "gathered_product": (
        lambda: [double(TOKENS, 5, seed=1), double(3, 5, seed=2)],
        lambda proxy, weight: gathered_product(double(TOKENS, 5, seed=3).detach(), proxy, weight),
    ),
    "compress": (
        lambda: [double(TOKENS, 8, seed=1), double(TOKENS, 8, seed=2), double(4, 8, seed=3)],
        lambda *x: compress(*x, compressed_keys(LAYOUT, 4, True), overlap=True),
    ),
    "norm_rope": (lambda: [double(*Q, seed=1)], lambda x: norm_rope(x, *tables(), 1e-6)),
    "hyper_connection": (
        lambda: [double(TOKENS, 2, 4, seed=1), double(8, 8, seed=2), double(8, seed=3)],
        lambda x, fn, base: written(x, Connection(fn, base, torch.ones(3).double(), 1e-6, 1e-6, 3)),
    ),
    "hyper_connection, head": (
        lambda: [double(TOKENS, 2, 4, seed=1), double(2, 8, seed=2), double(2, seed=3)],
        lambda x, fn, base: read_head(
            x, Connection(fn, base, torch.ones(1).double(), 1e-6, 1e-6), torch.ones(4)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "quadratic"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_is_refused(name, linear):
    """Also in a loss that is linear in the output, whose incoming gradient has no graph."""
    make, operation = OPERATIONS[name]
    leaves = make()
    out = operation(*leaves)
    loss = out.sum() if linear else out.square().sum()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(x.square().sum() for x in gradients)
        # Another term keeps a graph: otherwise the penalty's gradient is missing silently.
        torch.autograd.grad(penalty + leaves[0].sum(), leaves, allow_unused=True)


@pytest.mark.parametrize("name", ["sparse_attention", "sparse_indexer_loss"])
def test_first_derivatives_in_a_checkpoint_are_not(name):
    """A recomputed operation runs with gradients inside a backward pass."""
    make, operation = OPERATIONS[name]
    want = torch.autograd.grad(operation(*(leaves := make())).sum(), leaves)
    for reentrant in (True, False):
        leaves = make()
        checkpoint(operation, *leaves, use_reentrant=reentrant).sum().backward()
        for x, gradient in zip(leaves, want, strict=True):
            assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("inverse", [False, True])
def test_rotate_has_one(inverse):
    x = double(*Q, seed=1)
    cos, sin = tables()
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, cos, sin, inverse=inverse), [x])
    # Its gradient is constant; a product gives a second derivative other than 0.
    assert torch.autograd.gradgradcheck(lambda x: rotate(x * x, cos, sin, inverse=inverse), [x])


@pytest.mark.gpu
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate_has_one_on_a_gpu(inverse):
    from megatron_dsa.ops.rope import torch as unfused
    from megatron_dsa.ops.rope import triton as triton_kernels

    def second(module, x, cos, sin):
        out = module.rotate(x * x, cos, sin, inverse)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    x = double(*Q, seed=1)
    want = second(unfused, x, *tables())
    x32, cos, sin = (y.detach().float().cuda() for y in (x, *tables()))
    got = second(triton_kernels, x32.requires_grad_(), cos, sin)
    assert relative_error(got, want) < 1e-5


def functions():
    """Yield every autograd function of the package: ``file:name`` and its ``backward``."""
    package = pathlib.Path(megatron_dsa.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            if any(ast.unparse(base).endswith("Function") for base in node.bases):
                (backward,) = (x for x in node.body if getattr(x, "name", "") == "backward")
                yield f"{path.relative_to(package)}:{node.name}", node.name, backward


def is_safe(name: str, backward: ast.FunctionDef) -> bool:
    """Return whether it is decorated, or computes its gradient by its own ``apply``."""
    decorators = [ast.unparse(x) for x in backward.decorator_list]
    if decorators == ["staticmethod", "once_differentiable"]:
        return True
    calls = [ast.unparse(x.func) for x in ast.walk(backward) if isinstance(x, ast.Call)]
    return f"{name}.apply" in calls


def test_no_autograd_function_is_left_out():
    found = list(functions())
    assert len(found) > 20
    assert [place for place, name, backward in found if not is_safe(name, backward)] == []
