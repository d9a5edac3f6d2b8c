"""The Triton kernels that look for index scores that are not finite."""

import itertools

import pytest
import torch

from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded
from tests.helpers import leaf

KERNELS = "megatron_dsa.ops.indexer_topk.triton"
NAN, INF = float("nan"), float("inf")


def draw(queries, keys, heads=3, dim=16, dtype=torch.float32, device="cpu"):
    """Queries, keys and weights, and which tokens are unseen."""
    shapes = (queries, heads, dim), (keys, dim), (queries, heads)
    tensors = [
        leaf(*shape, seed=i, device=device).detach().to(dtype) for i, shape in enumerate(shapes)
    ]
    unseen = [torch.arange(n, device=device) % 3 == 1 for n in (queries, keys, queries)]
    return tensors, unseen


def bound(tensors, unseen):
    """The largest sum of products, in float64."""
    parts = []
    for x, hidden in zip(tensors, unseen, strict=True):
        kept = x if hidden is None else x[~hidden]
        parts.append(kept.double().abs().max() if kept.numel() else torch.zeros(()).double())
    return float(parts[0] * parts[1] * (1 + parts[2]))


def check(sums_fit, tensors, unseen):
    """Around the bound; for what is not finite, seen and unseen."""
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


def test_triton_interpreted():
    """The kernels, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter: with few programs, which look at several blocks."""
    from megatron_dsa.ops.indexer_topk import triton

    prepare_interpreter()
    triton._PROGRAMS, triton._BLOCK = 4, 32
    for queries, keys in ((1, 1), (5, 9), (37, 4)):
        for dtype in (torch.float32, torch.float16):
            tensors, unseen = draw(queries, keys, dtype=dtype)
            if dtype == torch.float32:
                check(triton.sums_fit, tensors, unseen)
            assert bool(triton.sums_fit(tensors, unseen, bound(tensors, unseen) + 1e-3))
    tensors, unseen = draw(5, 9)
    apart = [torch.stack([x, x], 1)[:, 0] for x in tensors]
    check(triton.sums_fit, apart, unseen)


def test_compiles_without_a_gpu(monkeypatch):
    """The same code for all sizes and limits, with and without padding."""
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
def test_triton_on_the_gpu(queries, keys, dtype):
    kernels = pytest.importorskip(KERNELS)
    tensors, unseen = draw(queries, keys, 64, 128, dtype, "cuda")
    check(kernels.sums_fit, tensors, unseen)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    kernels = pytest.importorskip(KERNELS)
    q = torch.ones(270_000, 64, 128, device="cuda", dtype=torch.bfloat16)
    rest = [torch.ones(n, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 270_000)]
    assert q.numel() > 2**31 and bool(kernels.sums_fit((q, *rest), [None] * 3, 3.0))
    q[-1, -1, -1] = NAN
    assert not bool(kernels.sums_fit((q, *rest), [None] * 3, 3.0))


if __name__ == "__main__":
    main()
