"""Visibility of other ranks' tokens, for every layout, against brute force."""

import random
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.dsa_kernels import dense_attention, gathered_latent_attention
from megatron_dsa.errors import ConfigError, ImplementationError
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops import dispatch
from megatron_dsa.ops.dense_attention import torch as torch_block
from megatron_dsa.ops.dense_attention.ring import (
    ContiguousShard,
    PackedRuns,
    PackedZigzagShard,
    ZigzagShard,
    token_shard,
)
from megatron_dsa.ops.dense_attention.sequences import Dense
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.compressed import visible_groups
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import CP_LAYOUTS, Sharding
from tests.helpers import relative_error

CPU = torch.device("cpu")


def cumulative(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(*lengths, padded=None, bound=None):
    """Return the fields read from Megatron's ``PackedSeqParams``."""
    return SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=cumulative(lengths),
        cu_seqlens_q_padded=None if padded is None else cumulative(padded),
        max_seqlen_q=bound,
    )


def seen(rows, source):
    """Return int ``[local tokens, source tokens]``: computations of each pair, by the parts."""
    count = torch.zeros(rows.tokens, rows.tokens, dtype=torch.int64)
    for part in rows.parts(source):
        block = torch.zeros_like(count[part.queries, part.keys])
        sequences = part.sequences
        if isinstance(sequences, Dense):
            for e in range(sequences.batch):
                block[e :: sequences.batch, e :: sequences.batch] = 1
            # Tokens of one batch element: positions ascend.
            block = block.tril() if part.causal else block
        else:
            for cu, size in zip((sequences.cu_q, sequences.cu_k), block.shape, strict=True):
                assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == size
                assert cu.diff().min() >= 0 and cu.diff().max() <= sequences.longest
            ends = zip(sequences.cu_q.tolist(), sequences.cu_k.tolist(), strict=True)
            q, k = next(ends)
            for next_q, next_k in ends:
                pairs = torch.ones(next_q - q, next_k - k, dtype=torch.int64)
                block[q:next_q, k:next_k] = pairs.tril() if part.causal else pairs
                q, k = next_q, next_k
        count[part.queries, part.keys] += block
    return count


def visible(whole, own, source, batch=1):
    """Return the same from the layout of all tokens and both ranks' positions."""
    element = torch.arange(batch)
    queries = (own[:, None] * batch + element).flatten()
    slots = (element * (whole.num_keys // batch) + source[:, None]).flatten()
    return (whole.start[queries, None] <= slots) & (slots < whole.end[queries, None])


def check(rows, places, whole, batch=1):
    for source in range(rows.cp):
        right = visible(whole, places[rows.rank], places[source], batch)
        assert seen(rows, source).equal(right.long()), (rows, source)
    # Local tokens are one kernel call, which the loop over blocks relies on.
    (own,) = rows.parts(rows.rank)
    assert own.causal and own.queries == own.keys == slice(None)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
def test_unpacked(cp_layout, cp, batch):
    whole = bshd_layout(24, batch, CPU)
    for rank in range(cp):
        layout = layout_from_megatron(24 // cp, batch, CPU, None, Sharding(cp, rank, cp_layout))
        rows = token_shard(layout)
        assert type(rows) is (ContiguousShard if cp_layout == "contiguous" else ZigzagShard)
        check(rows, layout.key_ownership.table, whole, batch)


def documents(draw, total, multiple):
    """Return random document lengths: real, and padded (``None`` without); at most ``total``."""
    real, padded, left = [], [], total
    with_padding = draw.random() < 0.5
    while left > 0 and len(real) < 12:
        largest = draw.choice((left, left, 1 + left // 4, 1 + left // 12))
        width = draw.randint(0, largest // multiple) * multiple
        length = width
        if with_padding and width:
            length = draw.choice((width, draw.randint(0, width), max(0, width - 1)))
        real.append(length)
        padded.append(width)
        left -= width
        if draw.random() < 0.1:
            break
    return real, padded if with_padding else None


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
def test_packed(cp_layout, cp):
    draw = random.Random(cp)
    for _ in range(60):
        total = 2 * cp * draw.choice((1, 4, 9))
        multiple = 2 * cp if cp_layout == "zigzag" else 1
        real, padded = documents(draw, total, multiple)
        bound = draw.choice((None, max(*real, 1), max(*real, 1) + 3))
        whole = packed_layout(cumulative(real), total, None, padded and cumulative(padded))
        for rank in range(cp):
            params = packed(*real, padded=padded, bound=bound)
            sharding = Sharding(cp, rank, cp_layout)
            layout = layout_from_megatron(total // cp, 1, CPU, params, sharding)
            rows = token_shard(layout)
            assert type(rows) is (PackedZigzagShard if cp_layout == "zigzag" else PackedRuns)
            assert all(len(rows.parts(source)) <= 1 for source in range(cp))
            check(rows, layout.key_ownership.table, whole)


def test_runs_in_any_order():
    draw, several = random.Random(0), 0
    for _ in range(100):
        cp, pieces, size = draw.choice((2, 3)), draw.choice((1, 2, 3)), draw.choice((1, 5))
        first = [size * i for i in range(cp * pieces)]
        draw.shuffle(first)
        held = [sorted(first[rank::cp]) for rank in range(cp)]
        runs = tuple(tuple((place, size) for place in ranks) for ranks in held)
        places = torch.tensor([[p + i for p in r for i in range(size)] for r in held])
        real, padded = documents(draw, cp * pieces * size, 1)
        cu = cumulative(real), padded and cumulative(padded)
        whole = packed_layout(cu[0], cp * pieces * size, None, cu[1])
        for rank in range(cp):
            rows = PackedRuns(cp, rank, pieces * size, cu[0], max(*real, 1), cu[1], runs=runs)
            check(rows, places, whole)
            several += any(len(rows.parts(source)) > 1 for source in range(cp))
    assert several > 20


def test_what_is_too_far_away_is_not_computed():
    """With short documents a rank needs only its neighbour's last tokens."""
    for rank in range(4):
        params = packed(*[5] * 12, bound=5)
        layout = layout_from_megatron(16, 1, CPU, params, Sharding(4, rank, "contiguous"))
        rows = token_shard(layout)
        assert {s for s in range(4) if rows.parts(s)} == {rank, max(rank - 1, 0)}
        assert rows.parts(rank)[0].sequences.longest == 5
        if rank:
            (part,) = rows.parts(rank - 1)
            assert (part.queries, part.keys) == (slice(0, 4), slice(12, 16))
            assert part.sequences.longest == 4


def test_what_evaluation_formed_can_be_trained_with():
    for cp_layout in CP_LAYOUTS:
        layout = layout_from_megatron(16, 1, CPU, packed(32, 8, 16), Sharding(4, 1, cp_layout))
        with torch.inference_mode():
            rows = token_shard(layout)
            sequences = [part.sequences for s in range(4) for part in rows.parts(s)]
            kept = []
            for x in sequences:
                queries = int(x.cu_q[-1])
                kept += [*x.ranges(queries), x.blind(queries), x.cu_q, x.cu_k]
        assert token_shard(layout) is rows
        assert kept and not any(x.is_inference() for x in kept)


def test_layouts_without_sequences_are_refused():
    with pytest.raises(ConfigError, match="layout must be one of sequences"):
        token_shard(visible_groups(bshd_layout(8, 1, CPU), 4))


HEADS, NOPE, ROPE, VALUE, RANK = 3, 8, 4, 8, 10


def latent_inputs(rows):
    """Draw ``q, latents, w_uk, w_uv`` and the output's gradient, float64."""
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (rows, HEADS, NOPE + ROPE), (rows, RANK + ROPE), (HEADS, NOPE, RANK), (HEADS, VALUE, RANK),
        (rows, HEADS, VALUE),
    )  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
@pytest.mark.parametrize("kind", ["two", "packed"])
def test_gathered_latents_of_a_layout(cp_layout, kind):
    cp, batch, total, params = 4, 2, 32, None
    if kind == "packed":
        batch, total, params = 1, 64, packed(13, 0, 24, 8, padded=(16, 0, 24, 8), bound=24)
    whole = layout_from_megatron(total, batch, CPU, params)
    inputs = latent_inputs(total * batch)
    leaves, dout = [x.clone().requires_grad_() for x in inputs[:4]], inputs[4]
    q, latents, w_uk, w_uv = leaves
    rope = latents[:, None, RANK:].expand(-1, HEADS, -1)
    k = torch.cat([torch.einsum("sr,hdr->shd", latents[:, :RANK], w_uk), rope], -1)
    v = torch.einsum("sr,hdr->shd", latents[:, :RANK], w_uv)
    right, _ = dense_attention(q, k, v, whole, softmax_scale=0.3)
    right.backward(dout)

    dispatch.reset_report()
    sums = [torch.zeros_like(x) for x in inputs[1:4]]
    for rank in range(cp):
        sharding = Sharding(cp, rank, cp_layout)
        layout = layout_from_megatron(total // cp, batch, CPU, params, sharding)
        places = layout.key_ownership.table[:, :, None] * batch + torch.arange(batch)
        order, own = places.flatten(), places[rank].flatten()
        mine = [x.clone().requires_grad_() for x in (inputs[0][own], *inputs[2:4])]
        grad_proxy = torch.zeros_like(inputs[1], requires_grad=True)
        out, lse = gathered_latent_attention(
            mine[0], inputs[1][order], *mine[1:], layout, softmax_scale=0.3, latent_grad=grad_proxy
        )
        out.backward(dout[own])
        assert relative_error(out, right[own]) < 1e-12
        assert torch.equal(lse.isfinite()[:, 0], layout.end > layout.start)
        assert relative_error(mine[0].grad, q.grad[own]) < 1e-12
        sums[0].index_add_(0, order, grad_proxy.grad)
        for total_grad, x in zip(sums[1:], mine[1:], strict=True):
            total_grad += x.grad
    for found, leaf in zip(sums, leaves[1:], strict=True):
        assert leaf.grad.norm() > 0 and relative_error(found, leaf.grad) < 1e-12
    assert dispatch.report()["dense_attention"] == {"torch": cp}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_of_gathered_latents_without_a_channel(dtype):
    layout = layout_from_megatron(16, 1, CPU, None, Sharding(2, 1, "contiguous"))
    q, latents, w_uk, w_uv, dout = (x.to(dtype) for x in latent_inputs(32))
    found = []
    for given in (True, False):
        own = latents.clone().requires_grad_(not given)
        wide = torch.promote_types(dtype, torch.float32)
        grad_proxy = torch.zeros_like(latents, dtype=wide).requires_grad_() if given else None
        out, _ = gathered_latent_attention(
            q[16:], own, w_uk, w_uv, layout, softmax_scale=0.3, latent_grad=grad_proxy
        )
        out.backward(dout[16:])
        found.append(grad_proxy.grad if given else own.grad)
    assert found[0].dtype == wide and found[1].dtype == dtype
    assert found[0].norm() > 0 and found[0].to(dtype).equal(found[1])


def test_wrong_latents_are_explained():
    layout = layout_from_megatron(16, 1, CPU, None, Sharding(2, 1))
    q, latents, w_uk, w_uv, _ = latent_inputs(32)
    weights = {"softmax_scale": 0.3}
    with pytest.raises(ConfigError, match=r"latents must be \[32, R \+ P\]"):
        gathered_latent_attention(q[16:], latents[:16], w_uk, w_uv, layout, **weights)
    with pytest.raises(ConfigError, match="latent_grad must have dtype float64"):
        gathered_latent_attention(
            q[16:], latents, w_uk, w_uv, layout, latent_grad=latents.float(), **weights
        )


@pytest.mark.parametrize("function", ["dense", "gathered"])
def test_the_budget_of_the_policy_is_kept(function, monkeypatch):
    """Forward and backward must respect the policy's workspace, not the default."""
    budgets, original = [], torch_block.items_within

    def recorded(budget, bytes_per_item):
        budgets.append(budget)
        return original(budget, bytes_per_item)

    monkeypatch.setattr(torch_block, "items_within", recorded)
    layout = bshd_layout(16, 1, CPU)
    q, latents, w_uk, w_uv, dout = latent_inputs(16)
    settings = {"softmax_scale": 0.3, "policy": Policy(workspace_bytes=4321)}
    q.requires_grad_()
    if function == "dense":
        out, _ = dense_attention(q, q, q, layout, **settings)
        out.sum().backward()
    else:
        out, _ = gathered_latent_attention(q, latents, w_uk, w_uv, layout, **settings)
        out.backward(dout)
    assert budgets == [4321, 4321]


def test_a_named_implementation_is_used_or_refused():
    layout = layout_from_megatron(16, 1, CPU, None, Sharding(2, 1))
    q, latents, w_uk, w_uv, _ = (x.bfloat16() for x in latent_inputs(32))
    arguments = (q[16:], latents, w_uk, w_uv, layout)
    for name, error, words in (
        ("flash2", ImplementationError, "needs a CUDA GPU"),
        ("flash9", ConfigError, "must be auto or one of torch-cudnn"),
    ):
        policy = Policy(named=(("dense_attention", name),))
        with pytest.raises(error, match=words):
            gathered_latent_attention(*arguments, softmax_scale=0.3, policy=policy)
