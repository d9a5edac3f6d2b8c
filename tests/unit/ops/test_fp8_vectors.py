"""Vectors in fp8 with a scale each, in torch and Triton."""

import pytest
import torch

from megatron_dsa.ops.indexer_topk import fp8
from tests.cases.triton_kernels import Recorder, assembly
from tests.helpers import leaf, relative_error

KERNELS = "megatron_dsa.ops.indexer_topk.triton"


def test_quantized():
    """3 bits of mantissa; the largest element is 448; zeros stay zeros."""
    x = torch.cat([leaf(50, 64, seed=3).detach() * 10.0 ** torch.arange(-20, 30)[:, None]])
    x = torch.cat([x, torch.zeros(1, 64)])
    values, scales = fp8.quantized(x.bfloat16())
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert (values.float().abs().amax(-1)[:-1] == 448).all() and scales[-1] == 1
    back = values.double() * scales.double()[:, None]
    error = (back - x.bfloat16().double()).abs()
    assert (error <= x.double().abs() * 0.0626 + scales.double()[:, None] * 2.0**-10).all()


def test_e4m3_rounds_to_the_nearest_number():
    # All finite numbers of e4m3: 4 exponent bits of bias 7, 3 of mantissa, no infinity.
    grid = [m * 2.0**-9 for m in range(8)]
    grid += [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    assert max(grid) == 448
    x = leaf(40, 16, seed=6, dtype=torch.float64).detach()
    scale = x.abs().amax(-1, keepdim=True) / 448
    all_numbers = torch.tensor(grid, dtype=torch.float64)
    nearest = (((x / scale).abs()[..., None] - all_numbers).abs()).argmin(-1)
    values, scales = fp8.quantized(x)
    held = values.double() * scales.double()[:, None]
    assert relative_error(held, all_numbers[nearest] * x.sign() * scale) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_numbers_are_finite(dtype):
    """A vector whose scale fp32 cannot hold is as good as 0, not NaN."""
    x = torch.zeros(2, 16, dtype=dtype)
    x[0, 0], x[1, 0] = 1e-43, 1e-30
    values, scales = fp8.quantized(x)
    back = values.double() * scales.double()[:, None]
    assert back.isfinite().all() and (scales > 0).all()
    assert abs(float(back[1, 0]) / 1e-30 - 1) < 1e-6


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_quantization_compiles_once_without_a_gpu(monkeypatch, capability):
    kernels = pytest.importorskip(KERNELS)
    recorder = Recorder(kernels._quantize)
    monkeypatch.setattr(kernels, "_quantize", recorder)
    for shape in ((1, 128), (48, 64, 128)):
        kernels.quantize(torch.zeros(shape, dtype=torch.bfloat16))
    made = [assembly(recorder.kernel, *launch, capability) for launch in recorder.launches]
    assert len({x.hash for x in made}) == 1 and ".local" not in made[0].asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (1001, 64, 128), (333, 5, 16), (0, 128)])
def test_quantized_by_triton(shape):
    """As torch does it, but for roundings of quotients that lie between two numbers."""
    kernels = pytest.importorskip(KERNELS)
    x = leaf(*shape, seed=2).detach().bfloat16().cuda()
    assert torch.equal(*(fp8.quantized(y)[0].float() for y in (x[::2], x[::2].contiguous())))
    if len(x) > 300:
        x[7], x[8, ..., 3], x[9, ..., 1], x[10] = 0.0, float("nan"), float("inf"), 3e38
    (got, scales), (want, wanted) = kernels.quantize(x), fp8.quantized(x.cpu())
    assert torch.equal(scales.nan_to_num(0).cpu(), wanted.nan_to_num(0)) or len(x) > 300
    finite = x.isfinite().all(-1).cpu()
    assert relative_error(scales.cpu()[finite], wanted[finite]) < 1e-6
    near = (got.cpu().float() - want.float())[finite].abs()
    assert bool((near <= want.float()[finite].abs() / 8).all())
    assert float((near > 0).float().mean() if near.numel() else 0) < 1e-3
    if len(x) > 300:
        assert got[8].isnan().any(-1).all() and got[9].isnan().any(-1).all()
