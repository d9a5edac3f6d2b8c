"""A gradient times a number: rounded once, in any of the dtypes that gradients have."""

import pytest
import torch

from megatron_dsa.numerics.scaling import scaled
from tests.cases.triton_kernels import interpret
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


def test_triton_interpreted():
    """The kernel, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter: one element, several programs, nothing."""
    from megatron_dsa.numerics.scaling_triton import scale

    factor = torch.tensor([0.3])
    for shape in ((1,), (3, 5000), (0, 4)):
        for source in (torch.float16, torch.float32):
            for target in (torch.float16, torch.float32):
                x = gradient(source, "cpu", shape)
                got = scale(x, factor, torch.empty(shape, dtype=target))
                assert torch.equal(got, (x.float() * factor).to(target))


@pytest.mark.gpu
def test_many_elements():
    """More than 2^31."""
    x = torch.ones(2**31 + 4097, device="cuda", dtype=torch.bfloat16)
    got = scaled(x, 3.0)
    assert bool((got[-5000:] == 3).all()) and bool((got[:5000] == 3).all())
    assert got.sum(dtype=torch.float64).item() == 3.0 * x.numel()


if __name__ == "__main__":
    main()
