"""Conformance of norm, rope and the rotation of index heads: torch, Triton, compiled Triton."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.rope import spec
from megatron_dsa.ops.rope import torch as unfused
from megatron_dsa.ops.rope.api import rotate, rotate_index
from tests.cases.triton_kernels import (
    assembly,
    assert_repeatable,
    interpret,
    prepare_interpreter,
    recorded,
)
from tests.helpers import double_leaf, leaf, relative_error

EPS = 1e-6
REFERENCE = SimpleNamespace(
    norm_rope=spec.reference_norm_rope,
    rotate=spec.reference_rotate,
    rotate_index=spec.reference_rotate_index,
)
KERNELS = "megatron_dsa.ops.rope.triton"
#: First dims, adjacent pairs, transform.
KINDS = list(itertools.product((True, False), repeat=3))
#: Function, arguments after the tables.
CALLS = {
    "norm_rope": ("norm_rope", (EPS,)),
    "rotate": ("rotate", (False,)),
    "inverse": ("rotate", (True,)),
} | {f"index {kind}": ("rotate_index", kind) for kind in KINDS}
HEADS = [name for name in CALLS if "index" not in name]
INDEX = [name for name in CALLS if "index" in name]
#: tokens, heads, dim, R: one head, all dims rotated, none, no power of two, no token.
SHAPES = [(5, 1, 8, 4), (7, 3, 16, 16), (4, 2, 6, 0), (9, 5, 24, 10), (0, 2, 8, 4)]
#: Index heads, powers of two: partial tiles, all dims rotated, few, none; no token.
INDEX_SHAPES = [
    (5, 3, 16, 8), (70, 1, 32, 32), (9, 8, 64, 12), (3, 2, 16, 0), (1, 1, 16, 4), (0, 2, 16, 4),
]  # fmt: skip


def make_case(tokens, heads, dim, rotated, dtype=torch.float64, device="cpu"):
    """Return ``x, cos, sin``; the tables are slices of a wider one."""
    x = leaf(tokens, heads, dim, seed=tokens + dim, device=device, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = leaf(tokens + 1, rotated // 2 + 3, seed=2, device=device, dtype=wide).detach()
    angle = angle[1:, : rotated // 2] * 3
    return x, angle.cos(), angle.sin()


def call_of(module, name, *more):
    function, rest = CALLS[name]
    return lambda *x: getattr(module, function)(*x, *rest, *more)


def run(call, x, cos, sin):
    y = call(x, cos, sin)
    upstream = leaf(*y.shape, seed=5, device=y.device, dtype=torch.bfloat16).detach().to(y.dtype)
    return y.detach().clone(), torch.autograd.grad(y, x, upstream)[0]


def check(module, name, x, cos, sin, tolerance, expected=REFERENCE):
    got = run(call_of(module, name), x, cos, sin)
    want = run(call_of(expected, name), double_leaf(x), cos.double(), sin.double())
    for part, a, b in zip(("y", "dx"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == x.dtype
        assert relative_error(a, b) < tolerance, part


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in CALLS for shape in (*SHAPES, *INDEX_SHAPES)],
)
def test_torch(name, shape):
    if name in INDEX and CALLS[name][1][2] and shape[2] in (6, 24):
        pytest.skip("no power of two")
    check(unfused, name, *make_case(*shape), 1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_small_workspace(name):
    case = make_case(9, 3, 16, 8)
    more = (False, 1) if name == "norm_rope" else (1,)
    small = run(call_of(unfused, name, *more), *case)
    for a, b in zip(small, run(call_of(unfused, name), *case), strict=True):
        assert torch.equal(a, b) if name in HEADS else relative_error(a, b) < 1e-14


@pytest.mark.parametrize("name", CALLS)
def test_bf16_is_rounded_once(name):
    check(unfused, name, *make_case(20, 4, 32, 8, dtype=torch.bfloat16), 4e-3)


def test_inverse_undoes():
    x, cos, sin = make_case(7, 3, 24, 10)
    y = unfused.rotate(x, cos, sin, False)
    assert torch.equal(y[..., :14], x[..., :14])
    assert relative_error(unfused.rotate(y, cos, sin, True), x) < 1e-14


@pytest.mark.parametrize(
    ("call", "x", "tables", "message"),
    [
        (rotate, (4, 6), (4, 1), "x must be"),
        (rotate, (4, 2, 5), (4, 1), "even dim"),
        (rotate, (4, 2, 6), (3, 1), "cos must be"),
        (rotate, (4, 2, 6), (4, 4), "at most"),
        (rotate_index, (4, 2, 6), (4, 1), "power of two"),
        (rotate_index, (4, 2, 8), (3, 1), "cos must be"),
    ],
)
def test_messages(call, x, tables, message):
    with pytest.raises(ConfigError, match=message):
        call(torch.zeros(x), torch.zeros(tables), torch.zeros(tables))
    x, table = torch.zeros(4, 2, 6), torch.zeros(4, 1)
    assert rotate_index(x, table, table, transform=False).shape == x.shape


def check_in_place(kernels, x, cos, sin):
    """Check that the result overwrites the input, and nothing else."""
    want = run(lambda *a: kernels.norm_rope(*a, EPS, False), x, cos, sin)
    places = []

    def call(x, cos, sin):
        given = (x * 1).view(-1, *x.shape[1:])
        y = kernels.norm_rope(given, cos, sin, EPS, True)
        places.append(y.data_ptr() == given.data_ptr())
        return y

    got = run(call, x, cos, sin)
    assert places == [True]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def check_strided(kernels, name):
    """Check strided heads, and a strided gradient."""
    x, cos, sin = make_case(7, 6, 32, 12, dtype=torch.float32)
    wide = torch.cat([x, x], 2).detach().requires_grad_()

    def strided(module):
        def call(wide, cos, sin):
            y = call_of(module, name)(wide[:, ::2, 16:48], cos, sin)
            return torch.cat([y, y.detach()], 2)

        return call

    got = run(strided(kernels), wide, cos, sin)
    want = run(strided(REFERENCE), double_leaf(wide), cos.double(), sin.double())
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-5


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.rope import triton as kernels

    prepare_interpreter()
    # The last one has more heads than a program.
    for shape in (*SHAPES, (3, 9, 1024, 64)):
        for name in HEADS:
            check(kernels, name, *make_case(*shape, dtype=torch.float32), 1e-5)
    for name in INDEX:
        for shape in INDEX_SHAPES:
            check(kernels, name, *make_case(*shape, dtype=torch.float32), 1e-5)
        # The interpreter has no products of bf16.
        check(kernels, name, *make_case(9, 8, 64, 12, dtype=torch.float16), 4e-4)
        check_strided(kernels, name)
    check_in_place(kernels, *make_case(7, 3, 24, 10, dtype=torch.float32))
    x, cos, sin = make_case(7, 6, 16, 4, dtype=torch.float32)
    strided = torch.cat([x, x], 1).detach().requires_grad_()
    got = run(lambda *a: kernels.norm_rope(a[0][:, ::2], *a[1:], EPS, True), strided, cos, sin)
    want = run(lambda *a: spec.reference_norm_rope(a[0][:, ::2], *a[1:], EPS), strided, cos, sin)
    assert relative_error(got[0], want[0]) < 1e-5 and relative_error(got[1], want[1]) < 1e-5
    infinite = torch.full((1, 1, 8), float("inf"))
    infinite[..., 1::2] = 1.0
    table = torch.ones(1, 1)
    kept = kernels.rotate(infinite, table, table, False)[..., :6]
    assert torch.equal(kept, infinite[..., :6])


@pytest.mark.parametrize(("heads", "dim"), [(64, 512), (128, 512), (64, 128)])
def test_compiles_without_a_gpu(monkeypatch, heads, dim):
    kernels = pytest.importorskip(KERNELS)
    recorders = recorded(monkeypatch, kernels, ("_forward", "_norm_backward"))
    x, cos, sin = make_case(3, heads, dim, 64, dtype=torch.bfloat16)
    kernels.norm_rope(x, cos, sin, EPS).sum().backward()
    kernels.rotate(x, cos, sin, True)
    assert [len(r.launches) for r in recorders] == [2, 1]
    for recorder in recorders:
        for args, kwargs in recorder.launches:
            for capability in (80, 89, 90, 100):
                compiled = assembly(recorder.kernel, args, kwargs, capability)
                ptx = compiled.asm["ptx"]
                assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
                assert ".local" not in ptx and "st.global.b16" not in ptx
                # Only tables and sums per head use shared memory.
                assert compiled.metadata.shared <= 4 * dim


@pytest.mark.parametrize("name", INDEX)
@pytest.mark.parametrize("heads", [1, 64])
def test_index_heads_compile_without_a_gpu(monkeypatch, heads, name):
    kernels = pytest.importorskip(KERNELS)
    recorders = recorded(monkeypatch, kernels, ("_index_forward", "_index_backward"))
    for tokens in (3, 16):
        case = make_case(tokens, heads, 128, 64, dtype=torch.bfloat16)
        call_of(kernels, name)(*case).sum().backward()
    assert [len(r.launches) for r in recorders] == [2, 2]
    for recorder in recorders:
        for capability in (80, 90, 100):
            compiled = [
                assembly(recorder.kernel, args, kwargs, capability)
                for args, kwargs in recorder.launches
            ]
            assert len({one.hash for one in compiled}) == 1
            ptx = compiled[0].asm["ptx"]
            assert ".local" not in ptx and "ld.global.v4.b32" in ptx


#: Largest errors of index heads.
ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}
ON_A_GPU = [
    (name, shape, torch.bfloat16, 5e-3)
    for name in HEADS
    for shape in ((4097, 64, 512), (1000, 128, 512), (5000, 64, 128), (77, 1, 512))
] + [
    (name, shape, dtype, tolerance)
    for name in INDEX
    for shape in ((4097, 64, 128), (1000, 1, 128), (333, 8, 64))
    for dtype, tolerance in ROUNDING.items()
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape", "dtype", "tolerance"), ON_A_GPU)
def test_triton_on_the_gpu(name, shape, dtype, tolerance):
    kernels = pytest.importorskip(KERNELS)
    case = make_case(*shape, min(shape[2], 64), dtype=dtype, device="cuda")
    check(kernels, name, *case, tolerance, expected=unfused)
    assert_repeatable(lambda: call_of(kernels, name)(*case), case[:1])
    if name == "norm_rope":
        check_in_place(kernels, *case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("names", "shape", "tolerance"),
    [(HEADS, (70_000, 64, 512), 5e-3), (INDEX[:1], (300_000, 64, 128), 2.5e-3)],
)
def test_more_elements_than_int32_counts(names, shape, tolerance):
    kernels = pytest.importorskip(KERNELS)
    x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_()
    _, cos, sin = make_case(shape[0], 1, shape[2], 64, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x.requires_grad_()
    for name in names:
        y = call_of(kernels, name)(x, cos, sin)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        for part in (slice(0, 50), slice(shape[0] - 50, shape[0])):
            small = double_leaf(x[part])
            want = call_of(unfused, name)(small, cos[part].double(), sin[part].double())
            (dwant,) = torch.autograd.grad(want, small, x[part].detach().double())
            assert relative_error(y[part], want) < tolerance
            assert relative_error(dx[part], dwant) < tolerance
        del y, dx


if __name__ == "__main__":
    main()
