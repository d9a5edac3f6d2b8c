"""Sparse attention between maps: equal to the same maps around sparse attention, in float64."""

import gc
import weakref

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.sparse_attention import mapped
from megatron_dsa.ops.sparse_attention.api import sparse_attention
from megatron_dsa.ops.sparse_attention.mapped import MappedQueries, mapped_attention
from tests.helpers import relative_error

TOKENS, HEADS, DIM, LATENT, WIDTH = 50, 3, 8, 5, 7
WANTED = ("latents", "query_weight", "output_weight", "kv", "sink")


class Call:
    """One call's tensors, leaves with a gradient; the maps depend on the token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)

        def leaf(*shape):
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return x.requires_grad_()

        self.latents, self.kv = leaf(TOKENS, LATENT), leaf(TOKENS, DIM)
        self.query_weight, self.output_weight = leaf(HEADS * DIM, LATENT), leaf(WIDTH, HEADS * DIM)
        self.sink, self.dout = leaf(HEADS), leaf(TOKENS, WIDTH).detach()
        self.factors = 1 + torch.arange(TOKENS, dtype=torch.float64)[:, None] / TOKENS
        self.lists = KeyLists(bshd_layout(TOKENS, 1, torch.device("cpu")), 9)
        self.arguments = {"softmax_scale": 0.3, "v_dim": DIM, "attn_sink": self.sink}

    def to_queries(self, latents, weight, tokens=slice(None)):
        return (latents * self.factors[tokens] @ weight.t()).view(-1, HEADS, DIM)

    def to_outputs(self, out, weight, tokens=slice(None)):
        return out.flatten(1) @ weight.t() * self.factors[tokens]

    def whole(self):
        q = self.to_queries(self.latents, self.query_weight)
        out = sparse_attention(q, self.kv, self.lists, **self.arguments).out
        return self.to_outputs(out, self.output_weight)

    def in_blocks(self, **more):
        q = MappedQueries(
            self.latents, self.query_weight, self.output_weight, self.to_queries, self.to_outputs,
            HEADS, DIM,
        )  # fmt: skip
        return mapped_attention(q, self.kv, self.lists, **self.arguments, **more).out

    def gradients(self, out, names=WANTED):
        return torch.autograd.grad(out, [getattr(self, name) for name in names], self.dout)


@pytest.fixture(autouse=True)
def four_blocks(monkeypatch):
    def blocks(tokens, *_args, **_settings):
        return tuple(slice(i, min(i + 16, tokens)) for i in range(0, tokens, 16))

    monkeypatch.setattr(mapped, "token_blocks", blocks)


def test_output_and_gradients():
    call = Call()
    expected, found = call.whole(), call.in_blocks()
    assert relative_error(found, expected) < 1e-14
    pairs = zip(WANTED, call.gradients(found), call.gradients(expected), strict=True)
    for name, ours, theirs in pairs:
        assert relative_error(ours, theirs) < 1e-13, name


@pytest.mark.parametrize("frozen", WANTED)
def test_frozen_tensors_get_no_gradient(frozen):
    call = Call()
    others = [name for name in WANTED if name != frozen]
    expected = call.gradients(call.whole(), others)
    getattr(call, frozen).requires_grad_(False)
    for ours, theirs in zip(call.gradients(call.in_blocks(), others), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-13
    assert getattr(call, frozen).grad is None


def test_bounds_of_deterministic_sums(add):
    """Bounds of ``|q|`` and ``|dout|`` over all blocks are their largest entries."""
    call, seen = Call(), []

    def seeing(torchs):
        def backward(inputs, out, lse, dout):
            seen.append((inputs.q.abs().max(), dout.abs().max(), inputs.key_sum.bounds()))
            return torchs(inputs, out, lse, dout)

        return backward

    add("sparse_attention_backward", seeing)
    call.gradients(call.in_blocks())
    of_queries, of_outputs, bounds = zip(*seen, strict=True)
    assert len(seen) == 4
    for largest_query, largest_output in bounds:
        assert largest_query == max(of_queries).float()
        assert largest_output == max(of_outputs).float()


def test_lists_of_a_block_fit_the_workspace(add):
    call, sizes = Call(), []

    def seeing(torchs):
        def forward(inputs):
            sizes.append(len(inputs.q))
            return torchs(inputs)

        return forward

    add("sparse_attention_forward", seeing)
    expected = call.whole()
    policy = Policy(workspace_bytes=2048)
    most = call.lists.tokens_at_once(policy)
    sizes.clear()
    assert most < 16 and relative_error(call.in_blocks(policy=policy), expected) < 1e-14
    assert max(sizes) == most and sum(sizes) == TOKENS


def test_buffers_end_with_the_backward(monkeypatch):
    """Without waiting for Python's collector of cycles."""
    call, alive = Call(), []

    class Watched(mapped._Backward):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(mapped, "_Backward", Watched)
    gc.disable()
    try:
        call.gradients(call.in_blocks())
        assert len(alive) == 1 and alive[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["softmax_scale", "kv", "attn_sink"])
def test_wrong_arguments_are_named(name):
    call = Call()
    if name == "kv":
        call.kv = call.kv[:, :-1]
    else:
        call.arguments[name] = float("nan") if name == "softmax_scale" else call.sink[:-1]
    with pytest.raises(ConfigError, match=name):
        call.in_blocks()
