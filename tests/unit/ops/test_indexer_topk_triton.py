"""Triton kernels of the selection against torch: lists of key indices, finite scores, fp8
vectors.
"""

import itertools

import pytest
import torch

from megatron_dsa.ops.indexer_topk import fp8
from megatron_dsa.ops.indexer_topk.torch import put, sums_fit
from megatron_dsa.ops.layout.layout import Seen
from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded
from tests.helpers import leaf, relative_error

KERNELS = "megatron_dsa.ops.indexer_topk.triton"
NAN, INF = float("nan"), float("inf")
#: tokens, width of the block, keys to select: more than a program, no token, no visible key.
SHAPES = [(7, 60, 5), (1, 1, 1), (33, 40, 64), (3, 3000, 2500), (0, 9, 4)]


def make_case(tokens, width, topk, device="cpu"):
    """Return visibility, with queries that see nothing, and sorted selections."""
    generator = torch.Generator().manual_seed(tokens)
    ends = torch.randint(0, width + 1, (tokens,), generator=generator)
    start = (ends - torch.randint(0, width + 1, (tokens,), generator=generator)).clamp_min(0)
    columns = torch.full((tokens, topk), -1)
    for row, (first, last) in enumerate(zip(start.tolist(), ends.tolist(), strict=True)):
        some = torch.randperm(last - first, generator=generator)[:topk].sort().values + first
        if last - first > topk:  # otherwise the selection is not read
            columns[row] = some
    seen = Seen(start.int().to(device), ends.int().to(device))
    return columns.int().to(device), seen


def expected(columns, seen, first, indices):
    """The lists by plain loops."""
    lists = []
    for row, own in enumerate(columns.tolist()):
        begin, end = int(seen.start[row]), int(seen.end[row])
        if end - begin <= len(own):
            own = list(range(begin, end)) + [-1] * (len(own) - end + begin)
        slots = [x + first if x >= 0 else -1 for x in own]
        lists.append([int(indices[x]) if x >= 0 and indices is not None else x for x in slots])
    return torch.tensor(lists, dtype=torch.int32).view(columns.shape)


def check_put(put, tokens, width, topk, device="cpu"):
    """Check every combination, with strided outputs."""
    columns, seen = make_case(tokens, width, topk, device)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(width + 7, generator=generator).to(device)
    for first in (0, 7):
        for key_indices in (None, rows):
            out = torch.full((2 * tokens, topk), 99, dtype=torch.int32, device=device)
            put(out[::2], columns.clone(), seen, first, key_indices)
            assert torch.equal(out[::2].cpu(), expected(columns, seen, first, key_indices))
            assert (out[1::2] == 99).all()
            few = (seen.end - seen.start <= topk).cpu()
            put(out[::2], None, seen, first, key_indices)
            want = expected(columns, seen, first, key_indices)
            assert torch.equal(out[::2].cpu()[few], want[few])


@pytest.mark.parametrize("shape", SHAPES)
def test_lists_in_torch(shape):
    check_put(put, *shape)


def test_lists_compile_without_a_gpu(monkeypatch):
    kernels = pytest.importorskip(KERNELS)
    (recorder,) = recorded(monkeypatch, kernels, ("_put",))
    for tokens, width, topk in ((1, 1, 1), (16, 64, 16), (7, 60, 5)):
        columns, seen = make_case(tokens, width, topk)
        for some in (None, columns):
            for rows in (None, torch.arange(width + 16)):
                kernels.put(torch.empty_like(columns), some, seen, 16, rows)
    assert len(recorder.launches) == 12
    for capability in (80, 90, 100):
        compiled = {assembly(recorder.kernel, *one, capability).hash for one in recorder.launches}
        assert len(compiled) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 9000, 2048)])
def test_lists_on_the_gpu(shape):
    kernels = pytest.importorskip(KERNELS)
    check_put(kernels.put, *shape, device="cuda")


def draw(queries, keys, heads=3, dim=16, dtype=torch.float32, device="cpu"):
    """Draw queries, keys and weights, and unseen tokens."""
    shapes = (queries, heads, dim), (keys, dim), (queries, heads)
    tensors = [
        leaf(*shape, seed=i, device=device).detach().to(dtype) for i, shape in enumerate(shapes)
    ]
    unseen = [torch.arange(n, device=device) % 3 == 1 for n in (queries, keys, queries)]
    return tensors, unseen


def bound(tensors, unseen):
    """Return the largest sum of products, in float64."""
    parts = []
    for x, hidden in zip(tensors, unseen, strict=True):
        kept = x if hidden is None else x[~hidden]
        parts.append(kept.double().abs().max() if kept.numel() else torch.zeros(()).double())
    return float(parts[0] * parts[1] * (1 + parts[2]))


def check_sums(sums_fit, tensors, unseen):
    """Check around the bound, and non-finite values, visible and invisible."""
    nothing = [None] * 3
    for hidden in (nothing, unseen):
        largest = bound(tensors, hidden)
        assert bool(sums_fit(tensors, hidden, largest * 1.01 + 1e-30))
        assert largest == 0 or not bool(sums_fit(tensors, hidden, largest * 0.99))
    for i, value in itertools.product(range(3), (NAN, INF, -INF, 3e38)):
        for token in range(min(len(tensors[i]), 4)):
            wrong = [x.clone() for x in tensors]
            wrong[i][token, ..., -1] = value
            wrong[(i + 1) % 3][0] = 30.0
            assert not bool(sums_fit(wrong, nothing, 1e38))
            if token % 3 == 1:
                assert bool(sums_fit(wrong, unseen, 1e38))
            else:
                assert not bool(sums_fit(wrong, unseen, 1e38))


def test_sums_in_torch():
    for queries, keys in ((1, 1), (5, 9), (37, 4)):
        check_sums(sums_fit, *draw(queries, keys))


def test_sums_compile_without_a_gpu(monkeypatch):
    kernels = pytest.importorskip(KERNELS)
    recorders = recorded(monkeypatch, kernels, ("_magnitudes", "_fit"))
    for queries, keys, limit in ((1, 1, 1.0), (16, 32, 0.5), (37, 301, 1e30)):
        tensors, unseen = draw(queries, keys, dtype=torch.bfloat16)
        for hidden in ([None] * 3, [x.to(torch.uint8) for x in unseen]):
            kernels.sums_fit(tensors, hidden, limit)
    recorders[1].launches = [
        ((largest, holds.to(torch.uint8), limit), options)
        for (largest, holds, limit), options in recorders[1].launches
    ]
    for recorder, variants in zip(recorders, (2, 1), strict=True):
        assert len(recorder.launches) == 6
        for capability in (80, 90, 100):
            hashes = {assembly(recorder.kernel, *one, capability).hash for one in recorder.launches}
            assert len(hashes) == variants


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4097, 4097), (300, 9000)])
def test_sums_on_the_gpu(queries, keys, dtype):
    kernels = pytest.importorskip(KERNELS)
    tensors, unseen = draw(queries, keys, 64, 128, dtype, "cuda")
    check_sums(kernels.sums_fit, tensors, unseen)


@pytest.mark.gpu
def test_sums_of_more_elements_than_int32_counts():
    kernels = pytest.importorskip(KERNELS)
    q = torch.ones(270_000, 64, 128, device="cuda", dtype=torch.bfloat16)
    rest = [torch.ones(n, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 270_000)]
    assert q.numel() > 2**31 and bool(kernels.sums_fit((q, *rest), [None] * 3, 3.0))
    q[-1, -1, -1] = NAN
    assert not bool(kernels.sums_fit((q, *rest), [None] * 3, 3.0))


def test_quantized():
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
    """A vector whose scale underflows fp32 must become 0, not NaN."""
    x = torch.zeros(2, 16, dtype=dtype)
    x[0, 0], x[1, 0] = 1e-43, 1e-30
    values, scales = fp8.quantized(x)
    back = values.double() * scales.double()[:, None]
    assert back.isfinite().all() and (scales > 0).all()
    assert abs(float(back[1, 0]) / 1e-30 - 1) < 1e-6


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("least", [0.0, fp8.LEAST])
def test_quantization_compiles_once_without_a_gpu(monkeypatch, capability, least):
    kernels = pytest.importorskip(KERNELS)
    (recorder,) = recorded(monkeypatch, kernels, ("_quantize",))
    for shape in ((1, 128), (48, 64, 128)):
        kernels.quantize(torch.zeros(shape, dtype=torch.bfloat16), least)
    made = [assembly(recorder.kernel, *launch, capability) for launch in recorder.launches]
    assert len({x.hash for x in made}) == 1 and ".local" not in made[0].asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (1001, 64, 128), (333, 5, 16), (0, 128)])
def test_quantized_by_triton(shape):
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


def test_triton_interpreted():
    interpret(__file__)


def main():
    """Run in the interpreter: few programs, with several blocks each."""
    from megatron_dsa.ops.indexer_topk import triton

    prepare_interpreter()
    for shape in SHAPES:
        check_put(triton.put, *shape)
    triton._PROGRAMS, triton._BLOCK = 4, 32
    for queries, keys in ((1, 1), (5, 9), (37, 4)):
        for dtype in (torch.float32, torch.float16):
            tensors, unseen = draw(queries, keys, dtype=dtype)
            if dtype == torch.float32:
                check_sums(triton.sums_fit, tensors, unseen)
            assert bool(triton.sums_fit(tensors, unseen, bound(tensors, unseen) + 1e-3))
    tensors, unseen = draw(5, 9)
    apart = [torch.stack([x, x], 1)[:, 0] for x in tensors]
    check_sums(triton.sums_fit, apart, unseen)


if __name__ == "__main__":
    main()
