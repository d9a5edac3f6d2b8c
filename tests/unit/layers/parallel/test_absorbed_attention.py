"""Absorbed attention in blocks of tokens against plain MLA in float64, and its saved tensors."""

import dataclasses
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    absorbed_attention,
    sparse_attention,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.sparse_attention import absorbed as module
from megatron_dsa.ops.sparse_attention.blocks import token_blocks
from megatron_dsa.ops.sparse_attention.spec import BACKWARD
from megatron_dsa.ops.sparse_attention.tilelang import launch
from tests.helpers import (
    leaf,
    never_waits,
    peak_bytes,
    peak_memory_above,
    relative_error,
    skip_unless_it_runs,
)

SCALE = 0.3
NAMES = ("out", "dq", "dkv", "dweights")


@dataclasses.dataclass
class Call:
    """Leaves and lists of one call."""

    q: torch.Tensor
    kv: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor
    dout: torch.Tensor
    scale: float = SCALE

    @property
    def leaves(self):
        return self.q, self.kv, self.weights

    def run(self, **settings):
        settings = {"softmax_scale": self.scale, "topk_length": self.length} | settings
        return absorbed_attention(*self.leaves, self.indices, **settings)

    def as_double(self):
        like = {"dtype": torch.float64}
        leaves = [x.detach().to(**like).requires_grad_() for x in self.leaves]
        return Call(*leaves, self.indices, self.length, self.dout.to(**like), self.scale)

    def gradients(self, out):
        return torch.autograd.grad(out, self.leaves, self.dout)


def make_call(
    tokens=37, keys=53, heads=3, own=5, rope=4, value=7, rank=11, width=9, *, device="cpu",
    dtype=torch.float64, scale=SCALE,
):  # fmt: skip
    """Draw leaves; ascending lists, two empty, one shortened to nothing."""
    generator = torch.Generator().manual_seed(7)
    indices = torch.full((tokens, width), -1, dtype=torch.int32)
    for t in range(tokens):
        chosen = torch.randperm(keys, generator=generator)[:width].sort().values
        indices[t, : len(chosen)] = chosen.int()
    length = torch.randint(1, width + 1, (tokens,), generator=generator).int()
    indices[3:4], indices[11:12] = -1, -1
    length[5:6] = 0
    like = {"device": device, "dtype": dtype}
    return Call(
        leaf(tokens, heads, own + rope, seed=1, **like),
        leaf(keys, rank + rope, seed=2, **like),
        leaf(heads, own + value, rank, seed=3, scale=rank**-0.5, **like),
        indices.to(device),
        length.to(device),
        leaf(tokens, heads, value, seed=4, **like).detach(),
        scale,
    )


def plain(call):
    """Compute plain MLA, not absorbed: ``out``, ``lse``, ``p_sum``; also for queries
    without keys.
    """
    rank, rope = call.weights.shape[2], call.kv.shape[1] - call.weights.shape[2]
    own = call.q.shape[2] - rope
    expanded = torch.einsum("kr,hdr->khd", call.kv[:, :rank], call.weights)
    shared = call.kv[:, None, rank:].expand(-1, expanded.shape[1], -1)
    k, v = torch.cat([expanded[..., :own], shared], -1), expanded[..., own:]
    place = torch.arange(call.indices.shape[1], device=call.indices.device)
    valid = (call.indices >= 0) & (place < call.length[:, None])
    ids = call.indices.clamp_min(0).long()
    logits = torch.einsum("qhd,qkhd->qhk", call.q, k[ids]) * call.scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    seen = valid.any(-1)[:, None, None]
    p = torch.softmax(torch.where(seen, logits, 0.0), -1) * (valid[:, None] & seen)
    return torch.einsum("qhk,qkhd->qhd", p, v[ids]), lse, p.sum(1)


def whole(call, **settings):
    """Compute with whole-sequence tensors: absorb, attend, apply ``W_uv``."""
    rank = call.weights.shape[2]
    own = call.q.shape[2] - (call.kv.shape[1] - rank)
    absorbed = torch.einsum("tha,har->thr", call.q[..., :own], call.weights[:, :own])
    result = sparse_attention(
        torch.cat([absorbed, call.q[..., own:]], -1), call.kv, call.indices,
        softmax_scale=call.scale, v_dim=rank, topk_length=call.length, **settings,
    )  # fmt: skip
    return torch.einsum("thr,hvr->thv", result.out, call.weights[:, own:])


def per_token(call):
    """Return the bytes per token of a block."""
    return 2 * call.q.shape[1] * (call.kv.shape[1] + call.weights.shape[2]) * call.q.itemsize


def policy(call, tokens):
    return Policy(workspace_bytes=tokens * per_token(call))


@pytest.fixture
def blocks_of(monkeypatch):
    """``blocks_of(n)``: blocks of ``n`` tokens on any GPU."""

    def use(size):
        cut = lambda tokens, *_: tuple(slices(tokens, size)) or (slice(0, 0),)  # noqa: E731
        monkeypatch.setattr(module, "token_blocks", cut)

    return use


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("tokens", "block"), [(37, 1), (37, 8), (37, 36), (37, 37), (1, 9)])
def test_equals_plain_mla(tokens, block, recompute, device):
    call = make_call(tokens, device=device)
    reset_report()
    result = call.run(want_p_sum=True, recompute=recompute, policy=policy(call, block))
    found = (result.out, result.p_sum, *call.gradients(result.out))
    out, lse, p_sum = plain(call)
    for ours, reference in zip(found, (out, p_sum, *call.gradients(out)), strict=True):
        assert ours.shape == reference.shape
        assert relative_error(ours, reference) < 1e-12
    empty = lse == float("-inf")
    assert torch.equal(result.lse == float("-inf"), empty)
    assert relative_error(result.lse[~empty], lse[~empty]) < 1e-12
    if device.type == "cpu":
        count = -(-tokens // block)
        assert report()["sparse_attention_backward"] == {"torch": count}
        assert report()["sparse_attention_forward"] == {"torch": count * (1 + recompute)}


@pytest.mark.parametrize("recompute", [False, True])
def test_no_tokens(recompute):
    call = make_call(0)
    result = call.run(want_p_sum=True, recompute=recompute)
    assert result.out.shape == (0, 3, 7) and result.lse.shape == (0, 3)
    assert result.p_sum.shape == (0, 9)
    dq, dkv, dweights = call.gradients(result.out)
    assert dq.shape == call.q.shape and not dkv.any() and not dweights.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_less_exact_than_whole_tensors(dtype):
    """Weight gradients are summed over blocks and rounded once."""
    call = make_call(90, dtype=dtype)
    exact = call.as_double()
    out = plain(exact)[0]
    reference = (out, *exact.gradients(out))
    (blocks, once) = (
        (out, *call.gradients(out))
        for out in (call.run(policy=policy(call, 7)).out, whole(call, policy=policy(call, 1000)))
    )
    limit = 1e-6 if dtype == torch.float32 else 1.2e-2
    for ours, theirs, exact in zip(blocks, once, reference, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, exact) < limit
        assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact) + 1e-7


def test_strided_inputs_and_gradients(blocks_of):
    """Megatron's gradients are transposed or expanded, and its queries are views."""
    blocks_of(10)
    call = make_call()
    strided = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in call.leaves]
    expected = call.run()
    got = absorbed_attention(*strided, call.indices, softmax_scale=SCALE, topk_length=call.length)
    assert relative_error(got.out, expected.out) < 1e-14
    for dout in (call.dout.transpose(0, 1).contiguous().transpose(0, 1), call.dout[:1, :1, :1]):
        dout = dout.expand_as(call.dout)
        ours = torch.autograd.grad(got.out, call.leaves, dout, retain_graph=True)
        theirs = torch.autograd.grad(expected.out, call.leaves, dout.clone(), retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            assert relative_error(one, other) < 1e-13


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_frozen_inputs(frozen, blocks_of):
    blocks_of(10)
    call = make_call()
    expected = call.gradients(call.run().out)
    for i in frozen:
        call.leaves[i].requires_grad_(False)
    call.run().out.backward(call.dout)
    for i, x in enumerate(call.leaves):
        assert (x.grad is None) if i in frozen else torch.equal(x.grad, expected[i])


def test_products_of_frozen_weights_and_queries_are_skipped(blocks_of, monkeypatch):
    blocks_of(10)
    call, calls = make_call(), {"weights": 0, "queries": 0}

    def count(name, function):
        def counted(*arguments):
            calls[name] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(module, "add_bmm", count("weights", module.add_bmm))
    monkeypatch.setattr(module, "write_head_products", count("queries", module.write_head_products))
    call.weights.requires_grad_(False), call.q.requires_grad_(False)
    call.run().out.backward(call.dout)
    # Forward: absorb, apply W_uv. Backward: absorb, gradient of the latent output.
    assert calls == {"weights": 0, "queries": 4 * 4}


@pytest.mark.parametrize("block", [6, 100])
def test_the_key_gradient_reaches_its_proxy_unrounded(block, blocks_of):
    blocks_of(block)
    call = make_call(dtype=torch.bfloat16)
    exact = call.as_double()
    expected = exact.gradients(plain(exact)[0])[1]
    proxy = torch.zeros(call.kv.shape, requires_grad=True)
    kv = call.kv.detach()
    dataclasses.replace(call, kv=kv).run(kv_grad=proxy).out.backward(call.dout)
    assert proxy.grad.dtype == torch.float32 and call.kv.grad is None
    assert relative_error(proxy.grad, expected) < 1.2e-2
    assert not torch.equal(proxy.grad, proxy.grad.bfloat16().float())


def test_a_graph_can_be_walked_twice(blocks_of):
    blocks_of(10)
    call = make_call()
    out = call.run().out
    first = torch.autograd.grad(out, call.leaves, call.dout, retain_graph=True)
    for one, other in zip(first, call.gradients(out), strict=True):
        assert torch.equal(one, other)


def indexer_of(tokens, record, dtype=torch.float64, device="cpu"):
    """Return an indexer's leaves and its training."""
    like = {"dtype": dtype, "device": device}
    inputs = IndexerInputs(
        leaf(tokens, 2, 8, seed=11, **like), leaf(tokens, 8, seed=12, **like),
        leaf(tokens, 2, seed=13, **like),
    )  # fmt: skip
    layout = bshd_layout(tokens, 1, torch.device(device))
    return IndexerTraining(inputs, layout, lambda: 0.5, record)


@pytest.mark.parametrize("teacher_bytes", [1, 8 * 10 * 9 * 4 * 2, 2**20])
@pytest.mark.parametrize("gives", [True, False])
def test_the_indexer_learns_the_same_in_any_blocks(gives, teacher_bytes, blocks_of, add):
    wrap = (lambda torchs: torchs) if gives else lambda f: lambda *x: (*f(*x)[:3], None)
    add("sparse_attention_backward", wrap, gives_teacher=gives)
    blocks_of(10)
    call = make_call(keys=37)
    found, values = [], []
    reset_report()
    for attend in (call.run, lambda **settings: SimpleNamespace(out=whole(call, **settings))):
        indexer = indexer_of(37, values.append)
        out = attend(indexer=indexer, policy=Policy(workspace_bytes=teacher_bytes)).out
        found.append(torch.autograd.grad(out, (*call.leaves, *indexer.inputs.tensors()), call.dout))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.norm() > 0
        assert relative_error(ours, theirs) < 1e-12
    assert len(values) == 2 and relative_error(*values) < 1e-12
    parts = {1: 4, 2**20: 1}.get(teacher_bytes, 2)
    assert report()["sparse_indexer_loss"] == {"torch": parts + 1}


def test_an_indexer_alone_is_trained(blocks_of):
    blocks_of(10)
    call = make_call(keys=37)
    trained = indexer_of(37, lambda _: None)
    expected = torch.autograd.grad(
        call.run(indexer=trained).out, trained.inputs.tensors(), call.dout
    )
    for x in call.leaves:
        x.requires_grad_(False)
    call.run(indexer=trained).out.backward(call.dout)
    for x, reference in zip(trained.inputs.tensors(), expected, strict=True):
        assert torch.equal(x.grad, reference)


def adding(torchs):
    """Return a backward that accumulates into a given sum, in its own order."""

    def backward(inputs, *saved):
        dq, dkv, dsink, p_sum = torchs(inputs, *saved)
        if inputs.key_sum is None:
            return dq, dkv, dsink, p_sum
        total = inputs.key_sum.buffer(lambda: torch.zeros_like(dkv.t()), lambda x: x.t())
        total += dkv.t()
        return dq, None, dsink, p_sum

    return backward


def test_a_backward_may_add_up_the_key_gradient(blocks_of, add):
    blocks_of(10)
    call = make_call()
    expected = call.gradients(call.run().out)
    add("sparse_attention_backward", adding, adds_keys=True)
    for ours, theirs in zip(call.gradients(call.run().out), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-13


@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
def test_bounds_of_sums_in_fixed_point_hold_and_are_not_far(spread, blocks_of, add):
    """Absorbed queries and gradients of the latent output never exist whole."""
    blocks_of(10)
    call = make_call(own=32, value=24, rank=40)
    with torch.no_grad():
        call.q.mul_(spread)
    seen = []

    def watching(torchs):
        def backward(inputs, out, lse, dout):
            seen.append((inputs.key_sum.bounds(), inputs.q.abs().max(), dout.abs().max()))
            assert inputs.key_sum.query_heads == 37 * 3
            return torchs(inputs, out, lse, dout)

        return backward

    add("sparse_attention_backward", watching)
    call.gradients(call.run().out)
    assert len(seen) == 4
    for place in (0, 1):
        most, bound = max(x[1 + place] for x in seen), seen[0][0][place]
        assert most <= bound < 16 * most


def saved_by(call, **settings):
    """Return sizes of saved tensors without the leaves."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call.run(**settings)
    return sorted(x.numel() for x in kept if not any(x is leaf for leaf in call.leaves))


def test_what_is_saved(blocks_of):
    blocks_of(20)
    call = make_call()
    small = [37, 37 * 3, 37 * 9]  # lengths, lse, indices
    assert saved_by(call, recompute=True) == small
    assert saved_by(call) == sorted([*small, 20 * 3 * 11, 17 * 3 * 11])


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_waits_for_the_garbage_collector(trains, blocks_of, monkeypatch):
    """A cycle would keep a layer's tensors alive in earlier layers' backwards."""
    blocks_of(10)
    made = []

    def noted(*arguments):
        made.append(weakref.ref(blocks := original(*arguments)))
        return blocks

    original = module._Blocks
    monkeypatch.setattr(module, "_Blocks", noted)
    gc.disable()
    try:
        call = make_call(keys=37)
        out = call.run(indexer=indexer_of(37, lambda _: None) if trains else None).out
        out.backward(call.dout)
        del out
        assert len(made) == 2 and not any(reference() for reference in made)
    finally:
        gc.enable()


def wide_call():
    """Return a call whose memory an absorbed tensor of all tokens would dominate."""
    return make_call(
        2048, 64, heads=16, own=8, rope=4, value=8, rank=124, width=4, dtype=torch.float32
    )


@pytest.mark.parametrize("way", ["kept", "recomputed", "without gradients"])
def test_no_wide_tensor_has_all_tokens(way):
    # An absorbed tensor of all tokens would dominate the memory.
    call = make_call(
        2048, 64, heads=16, own=8, rope=4, value=8, rank=124, width=4, dtype=torch.float32
    )
    workspace = 32 * per_token(call)
    limits = Policy(fused=False, workspace_bytes=workspace)
    wide, narrow, output = (2048 * 16 * dims * 4 for dims in (128, 12, 8))

    def step():
        if way == "without gradients":
            with torch.no_grad():
                call.run(policy=limits)
        else:
            call.gradients(call.run(recompute=way == "recomputed", policy=limits).out)

    step()
    latents = wide if way == "kept" else 0  # 124 of the 128 dims
    limit = latents + (output if way == "without gradients" else 4 * narrow) + 3 * workspace
    assert peak_bytes(torch.device("cpu"), step) < limit < latents + wide


def blocks_on(
    monkeypatch, tokens, heads, workspace=2**28, processors=132, keys=1000, least=0, **support
):
    """Return the sizes of blocks on a GPU with so many processors."""
    properties = SimpleNamespace(multi_processor_count=processors, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    chosen = dataclasses.replace(BACKWARD.candidates[-1].support, adds_keys=True, **support)
    choice = SimpleNamespace(candidate=SimpleNamespace(support=chosen))
    monkeypatch.setattr(type(BACKWARD), "choose", lambda *_: choice)
    call = describe_call("cpu", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=2048)
    device = torch.device("cuda" if processors else "cpu")
    policy = Policy(workspace_bytes=workspace)
    blocks = token_blocks(tokens, keys, call, policy, device, least=least)
    assert blocks[0].start == 0 and blocks[-1].stop == tokens
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    return [x.stop - x.start for x in blocks]


@pytest.mark.parametrize("heads", [1, 6, 16, 64, 96, 128])
@pytest.mark.parametrize("tokens", [0, 1, 4096, 8192, 131072])
def test_blocks_fill_the_gpu_with_whole_waves(tokens, heads, monkeypatch):
    sizes = blocks_on(monkeypatch, tokens, heads, workspace=1)
    rows_at_once = max(1, min(64 // heads, 8))
    wave = 132 * rows_at_once // -(-heads // 64)
    fewest = max(4 * wave, 2048) if heads <= 32 else max(8 * wave, 1024)
    assert len(sizes) == 1 or all(size % wave == 0 for size in sizes[:-1])
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    assert sizes[0] >= min(tokens, 2 / 3 * fewest) and sizes[0] <= 1.5 * fewest + wave
    assert sizes[-1] > 0 or tokens == 0


@pytest.mark.parametrize(("heads", "mib"), [(16, 1024), (64, 1024), (128, 1024), (128, 4096)])
def test_blocks_follow_the_workspace(heads, mib, monkeypatch):
    sizes = blocks_on(monkeypatch, 131072, heads, workspace=mib * 2**20)
    taken = sizes[0] * heads * 2 * (576 + 512) * 2
    if heads == 16:  # unions of four lists of 2048 keys each, head sums and teacher
        taken += sizes[0] * 2048 * (5 + 4 * 4 + 16 + 4)
    assert 0.8 * mib < taken / 2**20 <= mib


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_fewest_tokens_of_a_block(heads, monkeypatch):
    sizes = blocks_on(monkeypatch, 131072, heads, workspace=1, least=4096)
    assert 4096 <= sizes[0] < 5000
    assert blocks_on(monkeypatch, 5000, heads, workspace=1, least=4096) == [5000]


def test_blocks_of_a_cpu_follow_the_workspace_alone(monkeypatch):
    per_token = 4 * 2 * (576 + 512) * 2
    assert blocks_on(monkeypatch, 10, 4, 3 * per_token, processors=0) == [3, 3, 3, 1]
    assert blocks_on(monkeypatch, 9, 4, 4 * per_token, processors=0) == [3, 3, 3]
    assert blocks_on(monkeypatch, 3, 4, 1, processors=0) == [1, 1, 1]


def test_few_key_gradients_of_their_own(monkeypatch):
    """A backward that does not accumulate must make at most 16 of them."""
    adds = blocks_on(monkeypatch, 131072, 128, keys=131072)
    assert len(adds) > 100
    monkeypatch.undo()
    call = describe_call("cpu", dtype=torch.bfloat16, heads=128, qk_dim=576, v_dim=512, topk=64)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    makes = token_blocks(131072, 131072, call, Policy(), torch.device("cuda"))
    assert 12 < len(makes) <= 16
    assert len(token_blocks(131072, 131072, call, Policy(), torch.device("cuda"), False)) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 9)}, "q must be"),
        ({"kv": torch.zeros(53, 15, dtype=torch.float32)}, "kv must have dtype"),
        ({"kv": torch.zeros(53, 30, dtype=torch.float64)}, "kv must have the R = 11 columns"),
        ({"kv": torch.zeros(53, 10, dtype=torch.float64)}, "kv must have the R = 11 columns"),
        ({"weights": torch.zeros(2, 12, 11, dtype=torch.float64)}, "weights must be"),
        ({"weights": torch.zeros(3, 5, 11, dtype=torch.float64)}, "weights of 5"),
        ({"indices": torch.zeros(37, 9, dtype=torch.int64)}, "int32"),
        ({"length": torch.zeros(3, dtype=torch.int32)}, "topk_length"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(make_call(), **change).run()


def test_a_proxy_of_another_dtype_is_refused():
    call = make_call()
    with pytest.raises(ConfigError, match="kv_grad"):
        call.run(kv_grad=torch.zeros(call.kv.shape, dtype=torch.float32))


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="heads of each of the 2 ranks"):
        make_call().run(group=SimpleNamespace(size=lambda: 2))


def real_call(heads, tokens=300, keys=700, width=256):
    return make_call(
        tokens, keys, heads, 128, 64, 128, 512, width, device="cuda", dtype=torch.bfloat16,
        scale=192**-0.5,
    )  # fmt: skip


OURS = Policy(
    named=(("sparse_attention_forward", "tilelang"), ("sparse_attention_backward", "tilelang"))
)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("block", [64, 128, 300])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_fused_kernels_against_float64(heads, block, recompute, blocks_of, hopper):
    blocks_of(block)
    call = real_call(heads)
    exact = call.as_double()
    out, _, _ = plain(exact)
    reference = (out, *exact.gradients(out))
    ours = call.run(recompute=recompute, in_order=True, policy=OURS).out
    theirs = whole(call, in_order=True, policy=OURS)
    found = [(x, *call.gradients(x)) for x in (ours, theirs)]
    for name, one, other, exact in zip(NAMES, *found, reference, strict=True):
        error = relative_error(one, exact)
        assert error < 1.2e-2, name
        assert error < 1.05 * relative_error(other, exact) + 1e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_fused_kernels_train_the_indexer_in_blocks(heads, blocks_of, hopper):
    call, values, found = real_call(heads, keys=300), [], []
    for block in (64, 300):
        blocks_of(block)
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        inputs = IndexerInputs(
            leaf(300, 64, 128, seed=11, **like), leaf(300, 128, seed=12, **like),
            leaf(300, 64, seed=13, **like),
        )  # fmt: skip
        layout = bshd_layout(300, 1, torch.device("cuda"))
        indexer = IndexerTraining(inputs, layout, lambda: 0.5, values.append)
        out = call.run(indexer=indexer, in_order=True, policy=OURS).out
        found.append(torch.autograd.grad(out, (*call.leaves, *indexer.inputs.tensors()), call.dout))
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 5e-3
    assert relative_error(*values) < 1e-3


@pytest.fixture
def fixed_point(monkeypatch):
    """Key gradients as in torch's deterministic mode, without cuBLAS's variable."""
    return lambda: monkeypatch.setattr(launch, "deterministic_mode", lambda: True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_fixed_point_repeats_every_bit_over_blocks(heads, blocks_of, hopper, fixed_point):
    blocks_of(64)
    call = real_call(heads)
    free = call.gradients(call.run(in_order=True, policy=OURS).out)
    fixed_point()
    first, second = (call.gradients(call.run(in_order=True, policy=OURS).out) for _ in "12")
    for one, other, plain in zip(first, second, free, strict=True):
        assert torch.equal(one, other)
        assert relative_error(one, plain) < 4e-3  # both are rounded to bf16


@pytest.mark.gpu
def test_fixed_point_hides_nothing_that_is_not_finite(blocks_of, hopper, fixed_point):
    """A non-finite key of the last block must give no finite gradient."""
    blocks_of(64)
    call = real_call(64)
    last = call.indices[-1, 0].long()
    call.indices[:-1][call.indices[:-1] == last] = -1
    with torch.no_grad():
        call.kv[last] = float("nan")
    fixed_point()
    dkv = call.gradients(call.run(in_order=True, policy=OURS).out)[1]
    assert dkv.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_no_host_synchronisation(recompute, blocks_of, hopper):
    """The host runs ahead of the device; synchronisation per layer would stall it."""
    blocks_of(64)
    call = real_call(64)
    never_waits(
        lambda: call.gradients(call.run(recompute=recompute, in_order=True, policy=OURS).out)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_peak_memory(heads, recompute, hopper):
    call = real_call(heads, 16384, 16384, 64)

    def step():
        call.gradients(call.run(recompute=recompute, in_order=True, policy=OURS).out)

    step()
    _, peak = peak_memory_above(step)
    rows = 16384 * heads * 2
    narrow, latents = rows * (128 + 192), 0 if recompute else rows * 512
    blocks = blocks_taken(heads)
    sums = 4 * 16384 * 576 * 2 + heads * 256 * 512 * (4 + 2)  # of keys, in two orders; of weights
    assert peak < 1.05 * (narrow + latents + blocks + sums) + 2**28  # P and dS of many heads


def blocks_taken(heads):
    """Return the bytes of a block of 16384 tokens."""
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=64)
    blocks = token_blocks(16384, 16384, call, OURS, torch.device("cuda"))
    return blocks[0].stop * heads * 2 * (576 + 512) * 2


def test_tilelang_adds_up_the_key_gradient():
    (ours,) = (c for c in BACKWARD.candidates if c.name == "tilelang")
    assert ours.support.adds_keys
    skip_unless_it_runs(ours)
