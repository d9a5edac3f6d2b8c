"""Rotation of index heads: unfused against the formula, Triton against both, and its assembly."""

import itertools

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.rope import torch as unfused
from megatron_dsa.ops.rope.api import rotate_index
from megatron_dsa.ops.rope.spec import reference_rotate_index
from tests.cases.triton_kernels import (
    assembly,
    assert_repeatable,
    interpret,
    prepare_interpreter,
    recorded,
)
from tests.helpers import double_leaf, leaf, relative_error

KERNELS = "megatron_dsa.ops.rope.triton"
#: tokens, heads, dim, R: no tile is full, all dims rotated, few, none; no token.
SHAPES = [(5, 3, 16, 8), (70, 1, 32, 32), (9, 8, 64, 12), (3, 2, 16, 0), (1, 1, 16, 4)]
KINDS = list(itertools.product((True, False), repeat=3))


def make_case(tokens, heads, dim, rotated, dtype=torch.float64, device="cpu"):
    """``x, cos, sin``; the tables are slices of a wider one."""
    x = leaf(tokens, heads, dim, seed=tokens + dim, device=device, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = leaf(tokens + 1, rotated // 2 + 3, seed=2, device=device, dtype=wide).detach()
    angle = angle[1:, : rotated // 2] * 3
    return x, angle.cos(), angle.sin()


def run(call, x, *rest):
    y = call(x, *rest)
    upstream = leaf(*y.shape, seed=5, device=y.device, dtype=torch.bfloat16).detach().to(y.dtype)
    return y.detach().clone(), torch.autograd.grad(y, x, upstream)[0]


def check(call, kind, x, cos, sin, tolerance, reference=reference_rotate_index):
    got = run(call, x, cos, sin, *kind)
    want = run(reference, double_leaf(x), cos.double(), sin.double(), *kind)
    for part, a, b in zip(("y", "dx"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == x.dtype
        assert relative_error(a, b) < tolerance, part


@pytest.mark.parametrize("shape", [*SHAPES, (4, 2, 6, 4), (0, 2, 8, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_unfused(kind, shape):
    if kind[2] and shape[2] == 6:
        pytest.skip("no power of two")
    check(unfused.rotate_index, kind, *make_case(*shape), 1e-12)


def test_small_workspace():
    case = make_case(9, 3, 16, 8)
    small = run(lambda *x: unfused.rotate_index(*x, True, False, True, 1), *case)
    large = run(lambda *x: unfused.rotate_index(*x, True, False, True), *case)
    for a, b in zip(small, large, strict=True):
        assert relative_error(a, b) < 1e-14


def test_bf16_is_rounded_once():
    check(
        unfused.rotate_index, (True, True, True), *make_case(20, 4, 32, 8, dtype=torch.bfloat16),
        4e-3,
    )  # fmt: skip


def test_messages():
    x, cos, sin = torch.zeros(4, 2, 6), torch.zeros(4, 1), torch.zeros(4, 1)
    with pytest.raises(ConfigError, match="power of two"):
        rotate_index(x, cos, sin)
    with pytest.raises(ConfigError, match="cos must be"):
        rotate_index(x, cos[:3], sin, transform=False)
    assert rotate_index(x, cos, sin, transform=False).shape == x.shape


def check_strided(kernels, kind, dtype, tolerance):
    """Heads that lie apart, and a gradient that does."""
    x, cos, sin = make_case(7, 6, 32, 12, dtype=dtype)
    wide = torch.cat([x, x], 2).detach().requires_grad_()

    def call(rotate):
        def strided(wide, cos, sin):
            y = rotate(wide[:, ::2, 16:48], cos, sin, *kind)
            return torch.cat([y, y.detach()], 2)

        return strided

    got = run(call(kernels.rotate_index), wide, cos, sin)
    want = run(call(reference_rotate_index), double_leaf(wide), cos.double(), sin.double())
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < tolerance


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.rope import triton as kernels

    prepare_interpreter()
    for shape in (*SHAPES, (0, 2, 16, 4)):
        for kind in KINDS:
            case = make_case(*shape, dtype=torch.float32)
            check(kernels.rotate_index, kind, *case, 1e-5)
    for kind in KINDS:
        # The interpreter has no products of bf16.
        check(kernels.rotate_index, kind, *make_case(9, 8, 64, 12, dtype=torch.float16), 4e-4)
        check_strided(kernels, kind, torch.float32, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 64])
def test_compiles_without_a_gpu(monkeypatch, heads, kind):
    """For all generations: nothing is spilled; batches of any size take the same code."""
    kernels = pytest.importorskip(KERNELS)
    recorders = recorded(monkeypatch, kernels, ("_index_forward", "_index_backward"))
    for tokens in (3, 16):
        x, cos, sin = make_case(tokens, heads, 128, 64, dtype=torch.bfloat16)
        kernels.rotate_index(x, cos, sin, *kind).sum().backward()
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(4097, 64, 128), (1000, 1, 128), (333, 8, 64)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_on_the_gpu(tokens, heads, dim, kind, dtype):
    """Against float64, the same bits every time, and no waiting for the device."""
    kernels = pytest.importorskip(KERNELS)
    case = make_case(tokens, heads, dim, min(dim, 64), dtype=dtype, device="cuda")

    def call(*x):
        return kernels.rotate_index(*x, *kind)

    tolerance = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}[dtype]
    check(kernels.rotate_index, kind, *case, tolerance, reference=unfused.rotate_index)
    assert_repeatable(lambda: call(*case), case[:1])


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    kernels = pytest.importorskip(KERNELS)
    tokens, kind = 300_000, (True, True, True)
    x = torch.empty(tokens, 64, 128, device="cuda", dtype=torch.bfloat16).normal_()
    _, cos, sin = make_case(tokens, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x.requires_grad_()
    y = kernels.rotate_index(x, cos, sin, *kind)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for part in (slice(0, 50), slice(tokens - 50, tokens)):
        small = double_leaf(x[part])
        want = unfused.rotate_index(small, cos[part].double(), sin[part].double(), *kind)
        (dwant,) = torch.autograd.grad(want, small, x[part].detach().double())
        assert relative_error(y[part], want) < 2.5e-3
        assert relative_error(dx[part], dwant) < 2.5e-3


if __name__ == "__main__":
    main()
