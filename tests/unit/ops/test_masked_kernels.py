"""Masked dense attention's kernels: compiled without a GPU, run on one against float64."""

import dataclasses
import importlib
from functools import partial

import pytest
import torch

from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.presets import preset
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    indexer_topk,
    key_bits,
    masked_attention,
)
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.ops.dispatch import Policy, describe_call, meta_dispatch
from megatron_dsa.ops.layout.layout import packed_layout
from megatron_dsa.ops.masked_attention.spec import (
    BACKWARD,
    FORWARD,
    PROBABILITIES,
    MaskedAttentionInputs,
    pack,
)
from megatron_dsa.ops.masked_attention.triton.tiles import Tiles
from megatron_dsa.testing.cases import Lists, visible_keys
from megatron_dsa.testing.comparison import SPARSE_ATTENTION, Comparison, by_figure
from megatron_dsa.testing.masked_attention import (
    MaskedDims,
    MaskedReference,
    check_parts,
    masked_case,
)
from tests.helpers import (
    deterministic,
    needs_compiler,
    no_synchronisation,
    peak_memory_above,
    relative_error,
)

#: Dims of a key without rope, of its rope, and of a value.
V3_2, GLM_5, NO_ROPE = (128, 64, 128), (192, 64, 256), (256, 0, 256)
TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]


def program(module):
    return importlib.import_module(f"megatron_dsa.ops.masked_attention.tilelang.{module}")


#: For tests that run on a GPU.
all_dims = pytest.mark.parametrize("dims", [V3_2, GLM_5, NO_ROPE], ids=["V3.2", "GLM-5", "GLM-5.3"])


def kernels(dims=V3_2):
    """Return forward, backward and head sums; skip if they cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nope, rope, v = dims
    shape = {"heads": 16, "qk_dim": nope + rope, "v_dim": v, "rope_dim": rope, "topk": 128}
    candidates = [operation.candidates[0] for operation in (FORWARD, BACKWARD, PROBABILITIES)]
    for candidate in candidates:
        reason = candidate.reason(describe_call(device, dtype=torch.bfloat16, **shape))
        if reason is not None:
            pytest.skip(reason)
    return [candidate.load() for candidate in candidates]


@needs_compiler
def test_turns():
    """At every tile of queries, thread blocks must take turns, later keys first."""
    generator = torch.Generator().manual_seed(0)
    flags = torch.rand(7, 6, generator=generator) < 0.6
    ids = flags.int().argsort(dim=1, descending=True, stable=True).int()
    nothing = torch.empty(0)
    tiles = Tiles(nothing, nothing, nothing, ids, flags.sum(1).int())
    launch = program("launch")
    order = launch._order(tiles, True)
    for heads in (3, 2):
        turns = launch._turns(order, heads, True)
        assert turns.shape == (heads, 6, 2) and turns.dtype == torch.int32 and not turns.any()
    for tile in range(6):
        keys = [k for k in reversed(range(7)) if flags[k, tile]]
        for turn, k in enumerate(keys):
            place = ids[k, : int(flags[k].sum())].tolist().index(tile)
            assert order[k, place] == turn
    order = launch._order(tiles, False)
    assert order.shape == (1, 1) and launch._turns(order, 3, False).shape == (1, 1, 2)


@pytest.mark.parametrize("operation", [FORWARD, BACKWARD, PROBABILITIES], ids=lambda o: o.name)
def test_dims_that_are_declared(operation):
    """Rope is part of them: 256 dims with other rope are no key of GLM-5."""
    support = dataclasses.replace(operation.candidates[0].support, package=None)

    def reason(nope, rope, v):
        with meta_dispatch((9, 0)):
            return support.reason(describe_call(
                "cuda", dtype=torch.bfloat16, heads=64, qk_dim=nope + rope, v_dim=v, rope_dim=rope,
                topk=2048,
            ))  # fmt: skip

    assert reason(*V3_2) is None and reason(*GLM_5) is None and reason(*NO_ROPE) is None
    wanted = "needs dims 192/128/64 or 256/256/64 or 256/256/0"
    assert wanted in reason(192, 64, 128) and wanted in reason(192, 0, 128)
    assert reason(128, 128, 256).endswith("got 256/256/128")


@needs_compiler
def test_glm_5_takes_them_where_they_are_cheaper():
    for tokens, masked in ((4096, True), (16384, False)):
        config = preset(
            "glm-5", dsa=DSAOptions(sequence_length=tokens), dsa_indexer_loss_coeff=1.0,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        with meta_dispatch((9, 0)):
            assert attention_of(config).masked == masked


def random_lists(tokens, topk, causal=True, keys=None, seed=0):
    """Return random ascending lists of at most ``topk`` keys, on the GPU."""
    keys = keys or tokens
    generator = torch.Generator("cuda").manual_seed(seed)
    score = torch.rand(tokens, keys, device="cuda", generator=generator)
    if causal:
        visible = torch.ones(tokens, keys, dtype=torch.bool, device="cuda").tril(keys - tokens)
        score.masked_fill_(~visible, -1.0)
    best = score.topk(min(topk, keys), 1)
    indices = torch.where(best.values >= 0, best.indices, keys).sort(1).values
    indices = torch.where(indices == keys, -1, indices).int()
    return Lists(indices, None, keys)


def run(case, width=None):
    inputs = case.inputs()
    nope, rope = inputs.nope_dim, case.k_pe.shape[1]
    forward, backward, probabilities = kernels((nope, rope, inputs.v_dim))
    out, lse = forward(inputs)
    width = width or case.lists.indices.shape[1]
    sums = probabilities(inputs, lse, width, slice(0, len(case.q)))
    return out, lse, backward(inputs, out, lse, case.dout), sums


def check(case):
    reference, found = MaskedReference(case), Comparison(TOLERANCE, by_figure(TOLERANCE))
    out, lse, grads, sums = run(case)
    reference.forward(found, out, lse)
    reference.backward(found, *grads)
    reference.listed_keys(found, sums)
    assert not found.wrong(), found.errors


def with_nothing():
    """Add whole tiles of queries and keys without pairs; -1 and ids past the keys in the middle."""
    indices = random_lists(900, 100).indices.clone()
    indices[5] = -1
    indices[128:256] = -1
    indices[(indices >= 256) & (indices < 384)] = -1
    indices[7, 3], indices[8, 4] = 900, 2**31 - 1
    return Lists(indices, None, 900)


def one_half_of_every_group(half):
    """Alternate tiles of 64 keys, or of 64 queries, with and without pairs."""
    lists = random_lists(700, 300)
    indices = torch.where(lists.indices // 64 % 2 == half, lists.indices, -1)
    indices[torch.arange(700, device="cuda") // 64 % 4 == half] = -1
    return Lists(indices, None, 700)


def documents():
    """Return documents of one token, of none, and of lengths that no tile divides."""
    lengths = torch.tensor([0, 1, 130, 0, 1, 64, 300, 5]).cumsum(0).int().cuda()
    tokens = int(lengths[-1])
    mask = visible_keys(packed_layout(lengths, tokens, 300))
    keys = torch.arange(tokens, device="cuda")
    return Lists(torch.where(mask, keys, tokens).sort(1).values.int(), None, tokens)


#: Heads and lists: lengths that no tile divides, widths (also above the number of keys), other
#: numbers of queries than of keys.
LISTS = {
    **{
        f"{tokens} tokens, {heads} heads": (heads, partial(random_lists, tokens, 100))
        for tokens in (1, 63, 64, 65, 127, 128, 129, 300, 777)
        for heads in (1, 2, 3, 16, 17, 128)
    },
    **{
        f"K = {topk}": (8, partial(random_lists, 700, topk, causal=False, keys=900))
        for topk in (1, 63, 64, 100, 640, 2048)
    },
    **{
        f"{tokens} queries, {keys} keys": (
            4, partial(random_lists, tokens, 200, causal=False, keys=keys)
        )
        for tokens, keys in ((5, 1000), (1000, 5), (129, 4097))
    },
    "nothing selected": (4, with_nothing),
    "first halves": (3, partial(one_half_of_every_group, 0)),
    "second halves": (3, partial(one_half_of_every_group, 1)),
    "documents": (4, documents),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", LISTS)
@all_dims
def test_against_float64(dims, name):
    heads, lists = LISTS[name]
    check(masked_case(MaskedDims(heads, *dims), lists()))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "parts", "heads"), [(512, 4, 16), (300, 3, 6), (256, 2, 128)])
@all_dims
def test_parts_of_the_queries_with_a_part_of_the_heads_each(dims, tokens, parts, heads):
    case = masked_case(MaskedDims(heads, *dims), random_lists(tokens, 100))
    found = Comparison(TOLERANCE, by_figure(TOLERANCE))
    check_parts(found, case, parts, kernels(dims)[2], 100)
    assert not found.wrong(), found.errors


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [-300.0, 300.0])
@all_dims
def test_scores_far_from_zero(dims, shift):
    case = masked_case(MaskedDims(2, *dims), random_lists(600, 400))
    case.kv[..., 0] = torch.linspace(0, 3, 600, device="cuda").to(case.kv.dtype)[:, None]
    case.q[..., 0] = shift / 3
    check(case)


@pytest.mark.gpu
@all_dims
def test_no_queries_and_no_keys(dims):
    for tokens, keys in ((0, 300), (300, 0)):
        lists = Lists(torch.full((tokens, 4), -1, dtype=torch.int32, device="cuda"), None, keys)
        case = masked_case(MaskedDims(2, *dims), lists)
        out, lse, (dq, dkv, dk_pe), sums = run(case)
        assert out.shape == (tokens, 2, dims[2]) and not out.any()
        assert (lse == float("-inf")).all()
        assert not any(x.any() for x in (dq, dkv, dk_pe, sums.p_sum, sums.length))
        assert (sums.indices == -1).all()


@pytest.mark.gpu
@all_dims
def test_all_keys_are_dense_attention(dims):
    tokens, heads, nope = 515, 4, dims[0]
    case = masked_case(MaskedDims(heads, *dims), random_lists(tokens, tokens))
    out, _, grads, _ = run(case)
    q, kv, k_pe = (x.detach().float().requires_grad_() for x in (case.q, case.kv, case.k_pe))
    k = torch.cat([kv[..., :nope], k_pe[:, None].expand(-1, heads, -1)], -1)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, kv[..., nope:])), is_causal=True,
        scale=case.softmax_scale,
    )[0].transpose(0, 1)  # fmt: skip
    dense.backward(case.dout.float())
    assert relative_error(out, dense) < TOLERANCE
    for got, leaf in zip(grads, (q, kv, k_pe), strict=True):
        assert relative_error(got, leaf.grad) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [slice(0, 1), slice(100, 300), slice(777, 900)])
def test_keys_of_some_queries(listed):
    case = masked_case(MaskedDims(2), random_lists(900, 200))
    reference, found = MaskedReference(case), Comparison(TOLERANCE, by_figure(TOLERANCE))
    lse = reference.expected.lse.float()
    reference.listed_keys(found, kernels()[2](case.inputs(), lse, 200, listed), listed)
    assert not found.wrong(), found.errors


@pytest.mark.gpu
def test_parts_of_the_teacher(monkeypatch):
    kernels()
    tokens, generator = 700, torch.Generator("cuda").manual_seed(3)
    layout = packed_layout(torch.tensor([0, 300, 700], device="cuda").int(), tokens, 400)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    tensors = draw(tokens, 4, 192), draw(tokens, 4, 256), draw(tokens, 64)
    index = draw(tokens, 16, 128), draw(tokens, 128), draw(tokens, 16)
    bits = key_bits(*indexer_topk(IndexerInputs(*index), layout, 100), tokens)
    found = []
    for workspace in (2**28, 8 * 128 * 100 * 8):  # the latter for 128 tokens at a time
        policy, losses = Policy(workspace_bytes=workspace), []
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *index)]
        training = IndexerTraining(IndexerInputs(*leaves[3:]), layout, lambda: 0.5, losses.append)
        result = masked_attention(
            *leaves[:3], bits, softmax_scale=0.07, topk=100, indexer=training, policy=policy
        )
        result.out.float().square().sum().backward()
        found.append([losses[0], *(x.grad for x in leaves[3:])])
    (loss, *grads), (loss_of_parts, *grads_of_parts) = found
    assert relative_error(loss_of_parts, loss) < 1e-6
    for whole, parts in zip(grads, grads_of_parts, strict=True):
        # Sums of atomic additions, rounded to bf16.
        assert relative_error(parts, whole) < 1e-3


@pytest.mark.gpu
@all_dims
def test_results_do_not_depend_on_memory_or_order(dims):
    case = masked_case(MaskedDims(8, *dims), random_lists(900, 200))
    first = run(case)
    poison = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(2)]
    del poison
    again = run(case)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert all(torch.equal(x, y) for x, y in zip(first[3], again[3], strict=True))
    for one, other in zip(first[2], again[2], strict=True):
        assert relative_error(one, other) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 16])
@all_dims
def test_deterministic_mode(dims, heads):
    case = masked_case(MaskedDims(heads, *dims), random_lists(3000, 500))
    with deterministic():
        first = run(case)
        for _ in range(4):
            again = run(case)
            for one, other in zip(first[2], again[2], strict=True):
                assert torch.equal(one, other)
        small = masked_case(MaskedDims(heads, *dims), random_lists(700, 300))
        check(small)


@pytest.mark.gpu
@all_dims
def test_parts_of_the_heads(dims):
    whole = masked_case(MaskedDims(7, *dims), random_lists(900, 200))
    parts = dataclasses.replace(whole, workspace_bytes=3 * 900 * (dims[0] + dims[1]) * 4)
    with deterministic():
        for one, other in zip(run(whole)[2], run(parts)[2], strict=True):
            assert relative_error(one, other) < 1e-6
    check(parts)


@needs_compiler
def test_parts_of_the_heads_are_not_in_memory_at_once(monkeypatch):
    launch, small = program("launch"), torch.empty(128, device="meta")
    for name in ("numbers", "round_gradient", "_order", "_turns"):
        monkeypatch.setattr(launch, name, lambda *_: small)
    monkeypatch.setattr(launch, "_tiles", lambda *_, **__: Tiles(*[small] * 5))
    monkeypatch.setattr(launch._Call, "heads_together", lambda *_: 1)
    monkeypatch.setattr(launch.backward_program, "compiled", lambda *_: lambda *_: None)
    tokens, heads, parts = 512, 6, 3
    q, kv, k_pe, dout = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((tokens, heads, 192), (tokens, heads, 256), (tokens, 64),
                      (tokens, heads, 128))
    )  # fmt: skip
    inputs = MaskedAttentionInputs(q, kv, k_pe, small, 128, 1.0, q.numel() * 4 // parts)
    tracker = MemoryTracker()
    tracker.ignore(q, kv, k_pe, dout, small)
    with tracker:
        launch.backward(inputs, dout, small, dout)
    results = 2 * (q.numel() + kv.numel()) + 4 * k_pe.numel()
    part = (4 * q.numel() + 2 * tokens * heads * 64) // parts
    assert tracker.peak == results + part + 4 * k_pe.numel()  # the sum of a part's rope keys


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@all_dims
def test_memory_of_the_backward(dims, parts):
    tokens, heads = 4096, 32
    lists = random_lists(tokens, 512)
    case = masked_case(MaskedDims(heads, *dims), lists)
    case = dataclasses.replace(case, workspace_bytes=4 * case.q.numel() // parts)
    inputs = case.inputs()
    forward, backward, _ = kernels(dims)
    out, lse = forward(inputs)
    backward(inputs, out, lse, case.dout)
    results = 2 * (case.q.numel() + case.kv.numel()) + 4 * case.k_pe.numel()
    _, peak = peak_memory_above(lambda: backward(inputs, out, lse, case.dout))
    part = (4 * case.q.numel() + 2 * tokens * heads * 64) // parts
    assert peak <= results + part + 32 * 2**20


@pytest.mark.gpu
@all_dims
def test_nothing_waits_for_the_gpu(dims):
    case = masked_case(MaskedDims(4, *dims), random_lists(700, 300))
    run(case)
    torch.cuda.synchronize()
    with no_synchronisation():
        leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.kv, case.k_pe)]
        lists = case.lists
        bits = key_bits(lists.indices, lists.length, lists.num_keys)
        result = masked_attention(
            *leaves, bits, softmax_scale=case.softmax_scale, topk=300, want_p_sum=True
        )
        result.out.backward(case.dout)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    tokens, heads = 90_000, 128
    forward, backward, _ = kernels()
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    q, kv, k_pe, dout = (
        draw(tokens, heads, 192), draw(tokens, heads, 256), draw(tokens, 64),
        draw(tokens, heads, 128),
    )  # fmt: skip
    near = torch.arange(tokens, device="cuda")[:, None] - torch.arange(64, device="cuda")
    bits = torch.zeros(tokens, -(-tokens // 128), 4, dtype=torch.int32, device="cuda")
    for first in range(0, tokens, 9000):
        rows = slice(first, first + 9000)
        mask = torch.zeros(9000, tokens + 1, dtype=torch.bool, device="cuda")
        mask.scatter_(1, torch.where(near[rows] < 0, tokens, near[rows]), True)
        bits[rows] = pack(mask[:, :-1])
    results = []
    for own in (slice(0, heads), slice(heads - 2, heads)):
        part = MaskedAttentionInputs(
            q[:, own].contiguous(), kv[:, own].contiguous(), k_pe, bits, 128, 0.07, 2**31
        )
        out, lse = forward(part)
        dq, dkv, _ = backward(part, out, lse, dout[:, own].contiguous())
        results.append([x[:, -2:].clone() for x in (out, lse, dq, dkv)])
        del out, lse, dq, dkv, part
    for whole, part in zip(*results, strict=True):
        assert whole.isfinite().all()
        assert relative_error(whole, part) < 1e-3


@pytest.mark.gpu
@all_dims
def test_the_public_function_takes_the_kernels(dims):
    kernels(dims)
    nope, rope, v = dims
    lengths = torch.tensor([0, 1, 200, 513], dtype=torch.int32, device="cuda")
    tokens, generator = 513, torch.Generator("cuda").manual_seed(3)
    layout = packed_layout(lengths, tokens, 313)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    tensors = draw(tokens, 4, nope + rope), draw(tokens, 4, nope + v), draw(tokens, rope)
    index = draw(tokens, 16, 128), draw(tokens, 128), draw(tokens, 16)
    indices, length = indexer_topk(IndexerInputs(*index), layout, 100)
    found = []
    for policy in (Policy(), Policy(fused=False)):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *index)]
        training = IndexerTraining(IndexerInputs(*leaves[3:]), layout, lambda: 0.5, lambda kl: None)
        result = masked_attention(
            *leaves[:3], key_bits(indices, length, tokens), softmax_scale=0.07, topk=100,
            indexer=training, policy=policy,
        )  # fmt: skip
        result.out.float().square().sum().backward()
        found.append([result.out, result.lse, *(x.grad for x in leaves)])
    for ours, torchs in zip(*found, strict=True):
        assert relative_error(ours, torchs) < 2 * TOLERANCE
