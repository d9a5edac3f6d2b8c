"""Our kernel of the sparse indexer loss: value and gradients against float64 on a GPU.

Without a GPU: compiled code, and rejected arguments.
"""

import dataclasses

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_indexer_loss
from megatron_dsa.layers.warm_up import warm_up
from megatron_dsa.ops.common.arithmetic import valid_entries
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.indexer_loss.spec import SPARSE_LOSS, SparseLossInputs
from megatron_dsa.ops.indexer_loss.tilelang.launch import sparse, units_per_one
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.testing.cases import Lists
from megatron_dsa.testing.indexer_loss import expected_loss
from tests.helpers import (
    no_synchronisation,
    relative_error,
)

TOLERANCE = 5e-3
OURS = Policy(named=(("sparse_indexer_loss", "tilelang"),))
#: Bytes of shared memory of an SM, and the system's part per thread block.
PER_SM, RESERVED = 228 * 1024, 1024


def describe_index_call(heads=64, topk=128):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return describe_call(device, dtype=torch.bfloat16, heads=heads, qk_dim=128, v_dim=0, topk=topk)


def reason() -> str | None:
    ours = next(c for c in SPARSE_LOSS.candidates if c.name == "tilelang")
    return ours.reason(describe_index_call())


def needs_kernel(test):
    return pytest.mark.gpu(pytest.mark.skipif(reason() is not None, reason=str(reason()))(test))


def test_what_does_not_fit_is_refused():
    pytest.importorskip("tilelang")
    from megatron_dsa.ops.indexer_loss.tilelang.program import build

    for heads in (0, 65):
        with pytest.raises(ValueError, match=f"heads must be 1 to 64, got {heads}"):
            build(heads)
    arguments = make(4, 9, 3, 5, device="cpu")
    x = arguments.indexer
    for inputs, wrong in (
        (IndexerInputs(x.q[..., :64], x.k[:, :64], x.weights), "got 64, 5, relu=True"),
        (dataclasses.replace(x, relu=False), "got 128, 5, relu=False"),
    ):
        with pytest.raises(ValueError, match=wrong):
            sparse(dataclasses.replace(arguments, indexer=inputs))
    wide = torch.zeros(4, 2049, dtype=torch.int32)
    with pytest.raises(ValueError, match="got 128, 2049"):
        sparse(dataclasses.replace(arguments, indices=wide))


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_fixed_point_cannot_overflow(size):
    """All queries pull at one key with full weight and one sign; little range may be lost."""
    q = torch.full((300, 6, 128), size, dtype=torch.bfloat16)
    weights = torch.linspace(-1, 1, 1800, dtype=torch.bfloat16).view(300, 6)
    units = units_per_one(IndexerInputs(q, q[:, 0], weights))
    most = weights.double().abs().sum() * float(q[0, 0, 0])
    assert torch.log2(units).frac() == 0
    assert 2**55 < most * units.double() < 2**62
    for nothing in (q[:0], torch.zeros_like(q)):
        zero = units_per_one(IndexerInputs(nothing, q[:, 0], weights[: len(nothing)]))
        assert zero.isfinite().all() and (zero > 0).all()
    q[7, 3, 1] = float("nan")
    assert not units_per_one(IndexerInputs(q, q[:, 0], weights)).gt(0).any()


def make(queries, keys, heads, width, *, device="cuda", weights=torch.bfloat16, sharpness=1.0):
    """Draw ragged lengths, invalid entries anywhere, queries without keys or teacher, repeated
    keys.

    Keys 0 and the last are unselected, if there are more than two.
    """
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    scale = sharpness * (heads * 128) ** -0.5
    inputs = IndexerInputs(
        randn(queries, heads, 128).to(device, torch.bfloat16),
        randn(keys, 128).to(device, torch.bfloat16),
        (randn(queries, heads) * scale).to(device, weights),
    )
    inputs.k[keys // 2] = 0  # products of exactly 0 are not positive
    ids = torch.rand(queries, max(keys, width), generator=g).argsort(1)[:, :width].int()
    ids[(ids < 1) | (ids >= keys - 1)] = -1
    lost = torch.rand(queries, width, generator=g)
    ids[lost < 0.05] = -1
    ids[lost > 0.97] = keys
    ids[lost > 0.985] = 2**31 - 1
    ids[:, -1] = ids[:, 0]
    length = torch.randint(0, width + 1, (queries,), generator=g).int()
    length[queries // 2 :] = width
    teacher = torch.rand(queries, width, generator=g) ** 8
    length[1] = 0
    teacher[2] = 0
    length[3], ids[3] = width, -1
    ids, length, teacher = (x.to(device) for x in (ids, length, teacher))
    return SparseLossInputs(inputs, ids, length, teacher, 2**28)


def expected(inputs):
    """Return value and gradients of q, k and weights, by autograd in float64."""
    x = inputs.indexer
    found = expected_loss(x, Lists(inputs.indices, inputs.topk_length, len(x.k)), inputs.teacher)
    return found.loss, [found.q, found.k, found.weights]


def poisoned(arguments):
    """Return the same with NaN in unselected keys, and another teacher."""
    x = arguments.indexer
    used = torch.zeros(x.k.shape[0], dtype=torch.bool, device=x.k.device)
    valid = valid_entries(arguments.indices, arguments.topk_length, x.k.shape[0])
    used[arguments.indices[valid].long()] = True
    assert not used.all()
    k = torch.where(used[:, None], x.k, float("nan"))
    inputs = dataclasses.replace(x, k=k)
    return dataclasses.replace(arguments, indexer=inputs, teacher=arguments.teacher.clone()), used


def error(x, want):
    """Return the error relative to the expected norm, however small."""
    return float((x.double() - want.double()).norm() / want.double().norm())


def check(inputs):
    """Check value and gradients with NaN in unselected keys, twice in a row."""
    value, grads = expected(inputs)
    for _ in range(2):
        ours, used = poisoned(inputs)
        got = sparse(ours)
        assert relative_error(got.value, value) < 1e-5
        for name, ours, want in zip("qkw", got.gradients, grads, strict=True):
            assert error(ours, want) < TOLERANCE, name
        assert (got.gradients.k[~used] == 0).all()
        assert (got.gradients.q[1:4] == 0).all() and (got.gradients.weights[1:4] == 0).all()


@needs_kernel
@pytest.mark.parametrize(
    ("heads", "width", "keys"),
    [(64, 2048, 4096), (64, 300, 1000), (64, 200, 70), (32, 2048, 2300), (32, 100, 500)]
    + [(5, 63, 500), (5, 64, 90)],
)
def test_gradients(heads, width, keys):
    check(make(200, keys, heads, width))


@needs_kernel
@pytest.mark.parametrize("options", [{"weights": torch.float32}, {"sharpness": 60.0}])
def test_fp32_weights_and_scores_far_apart(options):
    """Scores hundreds apart: at students of 0 the teacher pulls with full weight."""
    check(make(100, 1000, 64, 257, **options))


@needs_kernel
def test_common_part_of_the_keys_has_no_gradient():
    """Differences sum to 0: a common part must not pass on rounding."""
    inputs = make(100, 3000, 64, 1000)
    x = inputs.indexer
    common = x.k[1].clone()
    k = (0.5 * x.k + common).contiguous()
    k[3000 // 2] = 0
    q = (0.5 * x.q + 0.3 * common).contiguous()
    check(dataclasses.replace(inputs, indexer=IndexerInputs(q, k, x.weights.abs())))


@needs_kernel
def test_one_selected_key_has_neither_loss_nor_gradient():
    """Student and teacher are 1; an approximate reciprocal and the log leave at most 2^-22."""
    inputs = make(50, 70, 64, 1)
    inputs = dataclasses.replace(inputs, topk_length=None)
    x = inputs.indexer
    got = sparse(poisoned(inputs)[0])
    rounding = 2**-20
    largest_q, largest_k = x.q.abs().max().float(), x.k.abs().max().float()
    most = x.weights.float().abs()
    assert abs(got.value) < 50 * rounding
    assert (got.gradients.q.float().abs() <= rounding * most[..., None] * largest_k).all()
    pull = torch.zeros(70, device="cuda")
    valid = valid_entries(inputs.indices, None, 70)[:, 0]
    pull.index_add_(0, inputs.indices[valid, 0].long(), most.sum(-1)[valid])
    assert (got.gradients.k.abs() <= rounding * pull[:, None] * largest_q).all()
    assert (got.gradients.weights.abs() <= rounding * 128 * largest_q * largest_k).all()


@needs_kernel
def test_value_alone():
    inputs = make(300, 1000, 64, 300)
    got = sparse(dataclasses.replace(poisoned(inputs)[0], want_gradients=False))
    assert got.gradients is None
    assert relative_error(got.value, expected(inputs)[0]) < 1e-5


@needs_kernel
def test_dispatch():
    inputs = make(500, 500, 64, 64)
    layout = bshd_layout(500, 1, torch.device("cuda"))
    policy = Policy(strict=True, named=OURS.named)
    leaves = [getattr(inputs.indexer, n).requires_grad_() for n in ("q", "k", "weights")]
    before = inputs.teacher.clone()
    reset_report()
    loss = sparse_indexer_loss(
        inputs.indexer, inputs.indices, inputs.teacher, layout,
        topk_length=inputs.topk_length, policy=policy,
    )  # fmt: skip
    assert report() == {"sparse_indexer_loss": {"tilelang": 1}}
    assert torch.equal(inputs.teacher, before)
    got = torch.autograd.grad(1.7 * loss, leaves)
    value, grads = expected(inputs)
    assert relative_error(loss, value) < 1e-5
    for x, want in zip(got, grads, strict=True):
        assert error(x, 1.7 * want) < 2 * TOLERANCE


@needs_kernel
@pytest.mark.parametrize("rows", [0, 70_000, 2**18 + 100])
def test_no_rows_and_many(rows):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=g)

    inputs = IndexerInputs(normal(rows, 64, 128), normal(512, 128), normal(rows, 64) * 2**-7)
    assert rows < 2**18 or inputs.q.numel() > 2**31
    indices = torch.rand(rows, 512, device="cuda", generator=g).argsort(1)[:, :32].int()
    teacher = torch.rand(rows, 32, device="cuda", generator=g) ** 8
    arguments = SparseLossInputs(inputs, indices, None, teacher, 2**30)
    got = sparse(arguments)
    assert got.gradients.q.shape == inputs.q.shape and got.gradients.weights.shape == (rows, 64)
    if rows == 0:
        assert got.value == 0 and (got.gradients.k == 0).all()
        return
    from megatron_dsa.ops.indexer_loss import torch as unfused

    want = unfused.sparse(dataclasses.replace(arguments, teacher=teacher.clone()))
    assert relative_error(got.value, want.value) < 1e-4
    assert error(got.gradients.k, want.gradients.k) < TOLERANCE
    pairs = [(got.gradients[i], want.gradients[i]) for i in (0, 2)]
    for part in (slice(50), slice(-50, None)):
        assert all(error(x[part], y[part]) < TOLERANCE for x, y in pairs)


@needs_kernel
@pytest.mark.parametrize(("heads", "width"), [(64, 640), (32, 200)])
def test_deterministic_mode_repeats(heads, width):
    inputs = make(700, 900, heads, width)
    default = sparse(poisoned(inputs)[0])
    torch.use_deterministic_algorithms(True)
    runs = [sparse(poisoned(inputs)[0]) for _ in range(20)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    for again in runs[1:]:
        assert torch.equal(again.value, runs[0].value)
        assert all(map(torch.equal, again.gradients, runs[0].gradients))
    assert error(runs[0].gradients.k, default.gradients.k) < 1e-5


@needs_kernel
def test_no_host_synchronisation_and_nothing_compiles_after_the_warm_up():
    """A layer's warm-up must compile everything that its steps call."""
    from megatron_dsa.ops.indexer_loss.tilelang.program import compiled

    topk_in_torch = (("indexer_scores", "torch"), ("indexer_topk", "torch"))
    policy = dataclasses.replace(OURS, named=OURS.named + topk_in_torch)
    reset_report()
    warm_up((("sparse_indexer_loss", describe_index_call(64, 128)),), policy, 0.05)
    assert report() == {}
    inputs = make(500, 500, 64, 128)
    layout = bshd_layout(500, 1, torch.device("cuda"))
    inputs.indexer.q.requires_grad_()
    misses = compiled.cache_info().misses
    with no_synchronisation():
        sparse_indexer_loss(
            inputs.indexer, inputs.indices, inputs.teacher, layout, policy=policy
        ).backward()
    assert compiled.cache_info().misses == misses
    assert inputs.indexer.q.grad.isfinite().all()
