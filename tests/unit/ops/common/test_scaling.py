"""A gradient times a number: rounded once, for all dtypes of gradients."""

import itertools

import pytest
import torch

from megatron_dsa.ops.common.scaling import Factor, Scaled, add_to_mean, scaled, scaled_together
from tests.cases.triton_kernels import assembly, interpret, recorded
from tests.helpers import leaf

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def gradient(dtype, device, shape=(37, 130)):
    return leaf(*shape, seed=1, device=device).detach().to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("target", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_scaled(device, dtype, target, as_tensor):
    x, factor = gradient(dtype, device), 0.3
    given = torch.tensor(factor, device=device) if as_tensor else factor
    got = scaled(x, given, target)
    exact = x.double() * (float(given) if dtype != torch.float64 else factor)
    if dtype == torch.float64 and as_tensor:
        exact = x * float(given)
    wide = exact if dtype == torch.float64 else (x.float() * torch.tensor(factor).float()).double()
    assert got.dtype == (target or dtype)
    assert torch.equal(got, wide.to(got.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_contiguous(device, dtype):
    x = gradient(dtype, device).t()
    assert torch.equal(scaled(x, 2.0), x * 2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_factors(device, dtype):
    number = lambda x: torch.tensor([x], device=device, dtype=torch.float64)  # noqa: E731
    for factor, value in (
        (Factor(0.5), 0.5),
        (Factor(0.5, times=number(3.0).float()), 1.5),
        (Factor(0.5, over=number(4.0)), 0.125),
        (Factor(0.5, number(3.0), number(4.0)), 0.375),
    ):
        given = [gradient(dtype, device, shape) for shape in ((5, 3), (7,), (2, 2, 2))]
        want = [x * value for x in given]
        got = scaled_together(given, factor, [dtype] * 3, in_place=True)
        for a, b, x in zip(got, want, given, strict=True):
            assert torch.equal(a, b) and a.data_ptr() == x.data_ptr()
        x = torch.tensor(2.0, device=device, dtype=dtype, requires_grad=True)
        factor.apply(x).backward()
        assert factor.apply(x).item() == 2 * value and x.grad.item() == value
        mean = torch.tensor([1.0, 2.0], device=device)
        add_to_mean(*mean.unbind(), Scaled(x.detach(), factor))
        assert mean.tolist() == [1 + 2 * value, 3.0]


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.common.scaling_triton import add_scaled, scale

    tensors = torch.tensor([0.6]), torch.tensor([2.0], dtype=torch.float64)
    shapes = ((1,), (3, 5000), (0, 4))
    for order in itertools.permutations(shapes):
        for count in (1, 2, 3):
            for source in (torch.float16, torch.float32):
                for target in (torch.float16, torch.float32):
                    check_together(scale, order[:count], source, target, (1.0, *tensors))
    check_together(scale, shapes, torch.float32, torch.float16, (0.75, None, None))
    check_together(scale, shapes, torch.float16, torch.float16, (0.75, tensors[0], None))
    check_together(scale, shapes, torch.float16, torch.float16, (0.75, None, tensors[1]))
    sums, counts = torch.tensor(3.0), torch.tensor(5.0)
    add_scaled(sums, counts, torch.tensor(8.0), 0.5, tensors[0], tensors[1])
    assert sums.item() == pytest.approx(3 + 8 * 0.5 * 0.6 / 2, rel=1e-6) and counts.item() == 6


def check_together(scale, shapes, source, target, factor):
    number, times, over = factor
    value = number * (1.0 if times is None else times.double())
    value = torch.as_tensor(value / (1.0 if over is None else over)).float()
    x = [gradient(source, "cpu", shape) for shape in shapes]
    got = [torch.empty(shape, dtype=target) for shape in shapes]
    scale(x, *factor, got)
    for a, b in zip(got, x, strict=True):
        assert torch.equal(a, (b.float() * value).to(target))


def test_compiles_without_a_gpu(monkeypatch):
    kernels = pytest.importorskip("megatron_dsa.ops.common.scaling_triton")
    scaling, adding = recorded(monkeypatch, kernels, ("_scale", "_add_scaled"))
    scale, over = torch.ones(1), torch.ones((), dtype=torch.float64)
    for size, number in ((1, 1.0), (16, 0.25), (4097, 3.0)):
        x = [torch.ones(size, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        kernels.scale(x, number, scale, over, x[::-1])
        kernels.add_scaled(torch.ones(()), torch.ones(()), torch.ones(()), number, scale, over)
    for recorder in (scaling, adding):
        assert len(recorder.launches) == 3
        for capability in (80, 90, 100):
            compiled = [assembly(recorder.kernel, *one, capability) for one in recorder.launches]
            assert len({one.hash for one in compiled}) == 1


@pytest.mark.gpu
def test_many_elements():
    x = torch.ones(2**31 + 4097, device="cuda", dtype=torch.bfloat16)
    got = scaled(x, 3.0)
    assert bool((got[-5000:] == 3).all()) and bool((got[:5000] == 3).all())
    assert got.sum(dtype=torch.float64).item() == 3.0 * x.numel()


if __name__ == "__main__":
    main()
