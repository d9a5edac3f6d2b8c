"""Query norm and rope on heads: unfused against autograd, Triton against both, and its assembly."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.rope import spec
from megatron_dsa.ops.rope import torch as unfused
from megatron_dsa.ops.rope.api import rotate
from tests.cases.triton_kernels import (
    assembly,
    assert_repeatable,
    interpret,
    prepare_interpreter,
    recorded,
)
from tests.helpers import double_leaf, leaf, relative_error

EPS = 1e-6
REFERENCE = SimpleNamespace(norm_rope=spec.reference_norm_rope, rotate=spec.reference_rotate)
KERNELS = "megatron_dsa.ops.rope.triton"
#: rows, heads, dim, R: one head, all dims rotated, none, sizes that are no powers of two.
SHAPES = [(5, 1, 8, 4), (7, 3, 16, 16), (4, 2, 6, 0), (9, 5, 24, 10), (0, 2, 8, 4)]


def make_case(rows, heads, dim, rotated, dtype=torch.float64, device="cpu"):
    """``x, cos, sin``; the tables are slices of a wider one."""
    x = leaf(rows, heads, dim, seed=rows + dim, device=device, dtype=dtype)
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    angle = leaf(rows + 1, rotated // 2 + 3, seed=2, device=device, dtype=accumulation).detach()
    angle = angle[1:, : rotated // 2] * 3
    return x, angle.cos(), angle.sin()


def operations(module):
    return {
        "norm_rope": lambda *x: module.norm_rope(*x, EPS),
        "rotate": lambda *x: module.rotate(*x, False),
        "inverse": lambda *x: module.rotate(*x, True),
    }


def run(call, x, cos, sin):
    y = call(x, cos, sin)
    upstream = leaf(*y.shape, seed=5, device=y.device, dtype=torch.bfloat16).detach().to(y.dtype)
    return y.detach().clone(), torch.autograd.grad(y, x, upstream)[0]


def check(call, name, x, cos, sin, tolerance, module=REFERENCE):
    got = run(call, x, cos, sin)
    want = run(operations(module)[name], double_leaf(x), cos.double(), sin.double())
    for part, a, b in zip(("y", "dx"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == x.dtype
        assert relative_error(a, b) < tolerance, part
    return got


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["norm_rope", "rotate", "inverse"])
def test_unfused(name, shape):
    check(operations(unfused)[name], name, *make_case(*shape), 1e-12)


def test_small_workspace():
    case = make_case(9, 5, 24, 10)
    for small, large in (
        (lambda *x: unfused.norm_rope(*x, EPS, False, 1), operations(unfused)["norm_rope"]),
        (lambda *x: unfused.rotate(*x, True, 1), operations(unfused)["inverse"]),
    ):
        for a, b in zip(run(small, *case), run(large, *case), strict=True):
            assert torch.equal(a, b)


def test_inverse_undoes():
    x, cos, sin = make_case(7, 3, 24, 10)
    y = unfused.rotate(x, cos, sin, False)
    assert torch.equal(y[..., :14], x[..., :14])
    assert relative_error(unfused.rotate(y, cos, sin, True), x) < 1e-14


def test_bf16_is_rounded_once():
    for name, call in operations(unfused).items():
        check(call, name, *make_case(20, 4, 32, 8, dtype=torch.bfloat16), 4e-3)


@pytest.mark.parametrize(
    ("x", "tables", "message"),
    [((4, 6), (4, 1), "x must be"), ((4, 2, 5), (4, 1), "even dim"),
     ((4, 2, 6), (3, 1), "cos must be"), ((4, 2, 6), (4, 4), "at most")],
)  # fmt: skip
def test_messages(x, tables, message):
    with pytest.raises(ConfigError, match=message):
        rotate(torch.zeros(x), torch.zeros(tables), torch.zeros(tables))


def check_in_place(kernels, x, cos, sin):
    """The result lies where the input was, and everything else is equal."""
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


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.rope import triton as triton_kernels

    prepare_interpreter()
    # The last one has more heads than a program takes.
    for shape in (*SHAPES, (3, 9, 1024, 64)):
        case = make_case(*shape, dtype=torch.float32)
        for name, call in operations(triton_kernels).items():
            check(call, name, *case, 1e-5)
    check_in_place(triton_kernels, *make_case(7, 3, 24, 10, dtype=torch.float32))
    x, cos, sin = make_case(7, 6, 16, 4, dtype=torch.float32)
    strided = torch.cat([x, x], 1).detach().requires_grad_()
    got = run(
        lambda *a: triton_kernels.norm_rope(a[0][:, ::2], *a[1:], EPS, True), strided, cos, sin
    )
    want = run(lambda *a: spec.reference_norm_rope(a[0][:, ::2], *a[1:], EPS), strided, cos, sin)
    assert relative_error(got[0], want[0]) < 1e-5 and relative_error(got[1], want[1]) < 1e-5
    infinite = torch.full((1, 1, 8), float("inf"))
    infinite[..., 1::2] = 1.0
    table = torch.ones(1, 1)
    kept = triton_kernels.rotate(infinite, table, table, False)[..., :6]
    assert torch.equal(kept, infinite[..., :6])


@pytest.mark.parametrize(("heads", "dim"), [(64, 512), (128, 512), (64, 128)])
def test_compiles_without_a_gpu(monkeypatch, heads, dim):
    """For Hopper and Blackwell: 16 bytes per access, and tiles that never leave the registers."""
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
                # Only tables and row sums pass through shared memory.
                assert compiled.metadata.shared <= 4 * dim


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(4097, 64, 512), (1000, 128, 512), (5000, 64, 128), (77, 1, 512)]
)
@pytest.mark.parametrize("name", ["norm_rope", "rotate", "inverse"])
def test_triton_on_the_gpu(name, rows, heads, dim):
    """Against float64, the same bits every time, and no waiting for the device."""
    kernels = pytest.importorskip(KERNELS)
    case = make_case(rows, heads, dim, 64, dtype=torch.bfloat16, device="cuda")
    call = operations(kernels)[name]
    check(call, name, *case, 5e-3, module=unfused)
    assert_repeatable(lambda: call(*case), case[:1])
    if name == "norm_rope":
        check_in_place(kernels, *case)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    """70000 rows, and more programs than a second grid dimension holds."""
    kernels = pytest.importorskip(KERNELS)
    rows = 70_000
    x = torch.empty(rows, 64, 512, device="cuda", dtype=torch.bfloat16).normal_()
    _, cos, sin = make_case(rows, 1, 512, 64, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x.requires_grad_()
    for name, call in operations(kernels).items():
        y = call(x, cos, sin)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        for part in (slice(0, 50), slice(rows - 50, rows)):
            small = double_leaf(x[part])
            want = operations(unfused)[name](small, cos[part].double(), sin[part].double())
            (dwant,) = torch.autograd.grad(want, small, x[part].detach().double())
            assert relative_error(y[part], want) < 5e-3
            assert relative_error(dx[part], dwant) < 5e-3
        del y, dx


if __name__ == "__main__":
    main()
