"""Selection in the fp8 arithmetic of inference engines, against a reference in numpy."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.api import selection_calls
from megatron_dsa.ops.indexer_topk.spec import ENGINE_SCORES, engine_scores
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import Block, QueryRange, Seen, bshd_layout
from megatron_dsa.ops.rope.api import rotate_index
from tests.cases.indexer_topk import LAYOUTS
from tests.helpers import leaf, peak_bytes, skip_unless_they_run
from tests.reference import engine_scores as reference

KERNELS = "megatron_dsa.ops.indexer_topk.triton"
ENGINE = Policy(indexer_numerics="deepgemm-fp8")
CPU = torch.device("cpu")


def numbers(x):
    return x.double().cpu().numpy()


def draw(rows, keys, heads=64, dim=128, *, seed=0, device="cpu"):
    """Draw bf16 inputs, some keys large, some 0; weights of both signs with fp32 constants."""
    q, k, weights = (
        leaf(*shape, seed=seed + i).detach().bfloat16()
        for i, shape in enumerate(((rows, heads, dim), (keys, dim), (rows, heads)))
    )
    k[::7] *= 300.0
    k[3::11] = 0.0
    in_fp32 = engine.fp32_weights(weights, dim)
    scaled = weights * (heads * dim) ** -0.5
    inputs = IndexerInputs(q, k, scaled, fp32_weights=in_fp32)
    move = {name: getattr(inputs, name).to(device) for name in ("q", "k", "weights")}
    return dataclasses.replace(inputs, **move, fp32_weights=in_fp32.to(device))


def ties(rows, keys, heads=64, dim=128):
    """Draw small integers and few different keys: most scores have equals."""
    inputs = draw(rows, keys, heads, dim)
    k = inputs.k[:9].clamp(-2, 2).round().repeat(-(-keys // 9), 1)[:keys]
    weights = torch.ones(rows, heads)
    return IndexerInputs(inputs.q.round(), k, weights, fp32_weights=weights)


def trained(rows, keys):
    """Draw queries and keys similar near a token, like a trained indexer's: a slowly turning
    direction shared by heads, noise, and head weights of one sign.
    """
    steps = torch.arange(keys, dtype=torch.float64)[:, None] * torch.logspace(-4, -1, 64).double()
    common = torch.cat([steps.cos(), steps.sin()], 1)
    k = common + 0.3 * leaf(keys, 128, seed=1).detach()
    q = common[-rows:, None] * (1 + leaf(1, 64, 1, seed=2).detach()) + 0.3 * leaf(
        rows, 64, 128, seed=3
    )
    weights = leaf(rows, 64, seed=4).detach().abs().bfloat16()
    scaled = weights * (64 * 128) ** -0.5
    inputs = IndexerInputs(q.detach().bfloat16(), k.bfloat16(), scaled)
    return dataclasses.replace(inputs, fp32_weights=engine.fp32_weights(weights, 128))


def last(rows, keys):
    """Return a layout of ``rows`` queries, the last of one sequence of ``keys``."""
    whole, first = bshd_layout(keys, 1, CPU), keys - rows
    return dataclasses.replace(
        whole,
        num_queries=rows,
        start=whole.start[first:],
        end=whole.end[first:],
        position=whole.position[first:],
        query_ranges=(QueryRange(slice(0, rows, 1), 0, first, keys, keys),),
    )


def expected(inputs, layout, topk):
    """Return the reference's selection, for layouts whose queries see the first keys."""
    made = reference.scores(numbers(inputs.q), numbers(inputs.k), inputs.fp32_weights.numpy())
    return reference.best(made, layout.end.tolist(), topk)


def agreement(a, b):
    """Return the share of entries of lists ``a`` in those of ``b``, query by query."""
    common = sum(len(set(x) & set(y) - {-1}) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    return common / int((a >= 0).sum())


#: Queries, keys, inputs; 64 heads of 128 dims, 2048 keys selected.
REAL = {
    "random, 8k keys": lambda: (draw(12, 8192), 8192),
    "trained, 8k keys": lambda: (trained(12, 8192), 8192),
    "ties, 8k keys": lambda: (ties(6, 8192), 8192),
    "random, 32k keys": lambda: (draw(3, 32768, seed=5), 32768),
}


@pytest.mark.parametrize("name", REAL)
def test_every_key_is_that_of_the_reference(name):
    """Real shapes; bf16 selects other keys, so the comparison can fail."""
    inputs, keys = REAL[name]()
    layout = last(len(inputs.q), keys)
    want = expected(inputs, layout, 2048)
    got, length = indexer_topk(inputs, layout, 2048, policy=ENGINE)
    assert torch.equal(got, torch.from_numpy(want)) and (length == 2048).all()
    exact, _ = indexer_topk(inputs, layout, 2048)
    share = agreement(exact, got)
    print(f"{name}: bf16 selects {share:.4%} of these keys")
    assert 0.9 < share <= 1 and (share < 1 or name.startswith("ties"))


def test_scores_equal_the_reference_to_the_bit():
    for heads in (64, 32, 5):
        inputs = draw(7, 700, heads, 128, seed=heads)
        padded = [np.zeros((7, -(-heads // 8) * 8, *more)) for more in ((128,), ())]
        padded[0][:, :heads], padded[1][:, :heads] = numbers(inputs.q), inputs.fp32_weights
        want = reference.scores(padded[0], numbers(inputs.k), padded[1].astype(np.float32))
        assert np.array_equal(all_scores(inputs).numpy(), want)
        # The reference of doctor and benchmarks must agree.
        in_float64 = engine_scores(inputs.q, inputs.k, inputs.fp32_weights)
        assert np.array_equal(in_float64.numpy(), want)


def all_scores(inputs, run=engine.Scores()):
    """Return scores of all pairs by an implementation of ``indexer_engine_scores``."""
    q, weights = engine.quantized_queries(inputs.q, inputs.fp32_weights)
    k, scales = engine.quantized(inputs.k)
    rows, keys = len(q), len(k)
    given = IndexerInputs(q, k, weights, key_scales=scales)
    layout = bshd_layout(keys, 1, q.device)
    (block,) = layout.blocks(lambda width: keys)
    zeros = torch.zeros(rows, dtype=torch.int32, device=q.device)
    block = dataclasses.replace(block, tokens=slice(0, rows, 1))
    assert isinstance(block, Block) and block.lo == 0 and block.hi == keys
    return run(given, block, k, Seen(zeros, zeros + keys))


def test_quantized():
    """Scales must be the least powers of two for the largest element; nothing is clipped."""
    x = leaf(60, 128, seed=3).detach() * 10.0 ** torch.arange(-30, 30)[:, None]
    # 448 and 449 times a power of two: the scale of one is the other's half.
    edges = torch.tensor([448.0, 450.0, 7 * 2.0**-9, 7.03125 * 2.0**-9, 0.0])[:, None]
    x = torch.cat([x, edges.expand(-1, 128)]).bfloat16()
    values, scales = engine.quantized(x)
    want, wanted = reference.quantised(numbers(x))
    assert np.array_equal(numbers(values), want) and np.array_equal(numbers(scales), wanted)
    assert scales[-5:].log2().tolist() == [0, 1, -15, -14, -22]
    assert np.abs(want).max() == 448


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("workspace", [1, 20_000, 2**26])
def test_layouts_and_workspaces(name, workspace):
    layout, inputs = LAYOUTS[name](CPU), draw(60, 60, 8, 32)
    policy = dataclasses.replace(ENGINE, workspace_bytes=workspace)
    indices, length = indexer_topk(inputs, layout, 5, policy=policy)
    slots = layout.keys_in_slot_order(torch.arange(60)[:, None])[:, 0]
    made = reference.scores(
        numbers(inputs.q), numbers(inputs.k[slots]), inputs.fp32_weights.numpy()
    )
    for t, row in enumerate(indices.tolist()):
        first, stop = int(layout.start[t]), int(layout.end[t])
        own = reference.best(made[t : t + 1, first:stop], [stop - first], 5)[0]
        want = [int(slots[first + i]) if i >= 0 else -1 for i in own]
        assert row == want
        assert int(length[t]) == sum(i >= 0 for i in row)


def test_compressed_keys():
    layout = compressed_keys(bshd_layout(800, 1, CPU), 4).layout
    inputs = draw(800, 200, 16, 64)
    some = torch.arange(700, 800, 7)
    indices, _ = indexer_topk(inputs, layout, 32, policy=ENGINE)
    made = reference.scores(
        numbers(inputs.q[some]), numbers(inputs.k), inputs.fp32_weights[some].numpy()
    )
    want = reference.best(made, layout.end[some].tolist(), 32)
    assert torch.equal(indices[some], torch.from_numpy(want))


@pytest.mark.parametrize("mib", [32, 64])
def test_memory_is_bounded(mib):
    inputs, layout = draw(40, 20_000, 16), last(40, 20_000)
    policy = dataclasses.replace(ENGINE, workspace_bytes=mib * 2**20)
    peak = peak_bytes(CPU, lambda: indexer_topk(inputs, layout, 2048, policy=policy))
    rest = 8192 * 128 * 8 + 20_000 * 128 * 12 + 40 * 2048 * 8
    assert mib * 2**19 < peak < mib * 2**20 + rest


def test_weights_without_fp32_ones_are_taken_as_they_are():
    inputs = draw(20, 300, 8, 32)
    plain = dataclasses.replace(inputs, weights=inputs.fp32_weights, fp32_weights=None)
    layout = last(20, 300)
    one, other = (indexer_topk(x, layout, 16, policy=ENGINE)[0] for x in (inputs, plain))
    assert torch.equal(one, other)
    # A constant rounded to bf16 with the weight is another weight.
    assert not torch.equal(inputs.weights.float(), inputs.fp32_weights)


def test_roundings_between_rope_and_transform():
    """Engines round rope to bf16, then the transform to bf16; also backwards."""
    x = leaf(40, 3, 64, seed=7).double().detach().requires_grad_()
    angles = leaf(40, 16, seed=8).detach()
    tables = angles.cos().float(), angles.sin().float()
    got = rotate_index(x.bfloat16(), *tables, neighbours=False, rounded=True)
    turned = rotate_index(x.bfloat16(), *tables, neighbours=False, transform=False)
    want = reference.hadamard(numbers(turned.detach()))
    # The last bit may differ if fp32 products are between two bf16 numbers.
    differs = numbers(got.detach()) != want
    assert differs.mean() < 2e-3
    plain = rotate_index(x.bfloat16(), *tables, neighbours=False)
    assert (plain != got).float().mean() > 0.05
    exact = rotate_index(x, *(t.double() for t in tables), neighbours=False)
    twice = rotate_index(x, *(t.double() for t in tables), neighbours=False, rounded=True)
    torch.testing.assert_close(exact, twice, rtol=1e-12, atol=1e-12)
    dy = leaf(40, 3, 64, seed=9).detach().double()
    (gradient,) = torch.autograd.grad(twice, x, dy)
    back = rotate_index(
        dy, *(t.double() for t in tables), neighbours=False, rounded=True, transposed=True
    )
    torch.testing.assert_close(gradient, back, rtol=1e-12, atol=1e-12)


def test_the_operation_is_what_runs():
    inputs, layout = draw(30, 100, 8, 32), last(30, 100)
    reset_report()
    indexer_topk(inputs, layout, 8, policy=ENGINE)
    assert report()["indexer_engine_scores"].keys() == {"torch"}
    assert "indexer_scores" not in report()
    shape = {"device": "cpu", "capability": None, "heads": 8, "qk_dim": 32, "v_dim": 0, "topk": 8}
    called = dict(selection_calls(OpCall(dtype=torch.bfloat16, **shape), ENGINE))
    assert called.keys() == {"indexer_topk", "indexer_engine_scores"}
    assert called["indexer_engine_scores"].dtype == torch.float8_e4m3fn


def test_what_engines_do_not_have_is_refused():
    layout = last(4, 40)
    without_relu = dataclasses.replace(draw(4, 40, 8, 32), relu=False)
    for message, inputs in (
        ("relu must be true", without_relu),
        ("at most 128 dims", draw(4, 40, 8, 256)),
    ):
        with pytest.raises(ConfigError, match=message):
            indexer_topk(inputs, layout, 8, policy=ENGINE)
    wrong = dataclasses.replace(draw(4, 40, 8, 32), fp32_weights=torch.ones(4, 7))
    with pytest.raises(ConfigError, match="fp32_weights"):
        indexer_topk(wrong, layout, 8, policy=ENGINE)


def test_support():
    shape = {"device": "cuda", "heads": 64, "qk_dim": 128, "v_dim": 0, "topk": 2048}
    for capability, reason in (((9, 0), None), ((10, 0), "wrong GPU"), ((8, 0), "wrong GPU")):
        call = OpCall(dtype=torch.float8_e4m3fn, capability=capability, **shape)
        ours, torchs = (c.reason(call) for c in ENGINE_SCORES.candidates)
        assert torchs is None and (
            reason in (ours or "") if reason else "wrong" not in (ours or "")
        )


CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1001, 64, 128), (333, 5, 16), (7, 128)])
def test_quantized_by_triton(shape):
    pytest.importorskip(KERNELS)
    x = (leaf(*shape, seed=2).detach() * 10.0 ** torch.linspace(-8, 8, shape[-1])).bfloat16()
    x[0] = 0.0
    for got, want in zip(engine.quantized(x.cuda()), engine.quantized(x), strict=True):
        assert torch.equal(got.cpu().float(), want.float())


@pytest.fixture
def ours():
    skip_unless_they_run(("indexer_engine_scores", "tilelang"))
    return ENGINE_SCORES.candidates[0].load()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [5, 16, 32, 64])
def test_the_kernel_adds_up_in_the_order_of_the_rule(ours, heads):
    """Tensor cores compute products of small integers exactly, so bits must agree."""
    inputs = draw(70, 1000, heads, 128, seed=heads, device=CUDA)
    # Scales are 1: the largest element of each vector is above 224.
    q, k = inputs.q.clamp(-2, 2).round(), inputs.k.clamp(-2, 2).round()
    q[..., 0], k[..., 0] = 256.0, 0.0
    k[..., 1], q[..., 1] = 256.0, 0.0
    inputs = dataclasses.replace(inputs, q=q, k=k)
    on_cpu = dataclasses.replace(
        inputs, q=q.cpu(), k=k.cpu(), fp32_weights=inputs.fp32_weights.cpu()
    )
    assert torch.equal(all_scores(inputs, ours).cpu(), all_scores(on_cpu))


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_the_kernel_selects_what_the_reference_does(ours, name):
    """Hopper's tensor cores keep fewer bits of products, as in the engine."""
    inputs, keys = REAL[name]()
    layout = last(len(inputs.q), keys)
    want = torch.from_numpy(expected(inputs, layout, 2048))
    on_gpu = dataclasses.replace(
        inputs,
        **{x: getattr(inputs, x).cuda() for x in ("q", "k", "weights", "fp32_weights")},
    )
    there = dataclasses.replace(
        layout, **{x: getattr(layout, x).cuda() for x in ("start", "end", "position")}
    )
    reset_report()
    got, _ = indexer_topk(on_gpu, there, 2048, policy=ENGINE)
    assert report()["indexer_engine_scores"].keys() == {"tilelang"}
    again, _ = indexer_topk(on_gpu, there, 2048, policy=ENGINE)
    assert torch.equal(got, again)
    share = agreement(want, got.cpu())
    print(f"{name}: {share:.4%} of the reference's keys")
    assert share > 0.998
