"""Merging parts of attention: all queries, the first, the last, or some in the middle."""

import pytest
import torch

from megatron_dsa.ops.dense_attention.ring.combine import Combined, merge_torch
from tests.cases.triton_kernels import Recorder, assembly, interpret, prepare_interpreter
from tests.helpers import relative_error

KERNELS = "megatron_dsa.ops.dense_attention.ring.combine_triton"
SHAPES = [(52, 3, 24), (64, 128, 128)]
#: Queries of the second and third part.
RANGES = [(0, None), (40, None), (0, 17), (9, 50)]


def test_rows_without_keys_combine():
    none = float("-inf")
    lse = torch.tensor([[none, 1.0, none, 2.0]]).t()
    other = torch.tensor([[0.5, none, none, 2.0]]).t()
    out = torch.tensor([[0.0, 3.0, 0.0, 4.0]]).t()[..., None]
    part = torch.tensor([[5.0, 0.0, 0.0, 6.0]]).t()[..., None]
    merged = merge_torch(out.bfloat16(), lse, part.bfloat16(), other, 0, torch.float32)
    assert torch.equal(merged.flatten(), torch.tensor([5.0, 3.0, 0.0, 5.0]))
    assert relative_error(lse[[0, 1, 3], 0], torch.tensor([0.5, 1.0, 2.0 + 0.6931472])) < 1e-6
    assert lse[2] == none


def make_parts(shape, ranges, dtype):
    """Return three parts: of all queries, and two of a range."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for index in range(3):
        rows = slice(*ranges) if index else slice(None)
        count = len(range(shape[0])[rows])
        out = torch.randn(count, *shape[1:], generator=generator).to(dtype)
        lse = torch.randn(out.shape[:2], generator=generator) * 3
        hidden = torch.rand(lse.shape, generator=generator) < 0.3
        out.masked_fill_(hidden[..., None], 0)
        parts.append((rows, out, lse.masked_fill_(hidden, -torch.inf)))
    return parts


def combined(parts, dtype, device="cpu"):
    found = Combined(dtype)
    for index, (rows, out, lse) in enumerate(parts):
        # Copies, because parts are overwritten.
        out, lse = out.to(device, copy=True), lse.to(device, copy=True)
        found.add(out, lse, rows, last=index == 2)
    assert found.out.dtype == dtype and found.out.is_contiguous()
    return found.out.cpu(), found.lse.cpu()


def by_softmax(parts, shape):
    """Return output and lse over all parts at once, in float64."""
    out = torch.zeros(3, *shape, dtype=torch.float64)
    lse = torch.full((3, *shape[:2]), float("-inf"), dtype=torch.float64)
    for index, (rows, part, part_lse) in enumerate(parts):
        out[index, rows], lse[index, rows] = part.double(), part_lse.double()
    weights = lse.softmax(0).nan_to_num(0.0)
    return (weights[..., None] * out).sum(0), lse.logsumexp(0)


def check(found, right, tolerance):
    finite = right[1].isfinite()
    assert torch.equal(found[1].isfinite(), finite) and not finite.all()
    assert relative_error(found[0], right[0]) < tolerance
    assert relative_error(found[1][finite], right[1][finite]) < 1e-6


@pytest.mark.parametrize("ranges", RANGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_of_some_rows(dtype, ranges):
    parts = make_parts(SHAPES[0], ranges, dtype)
    tolerance = 3e-3 if dtype == torch.bfloat16 else 1e-6
    check(combined(parts, dtype), by_softmax(parts, SHAPES[0]), tolerance)


def test_triton_interpreted():
    interpret(__file__)


def main():
    """Run in the interpreter: accumulate in place, and write another dtype."""
    from megatron_dsa.ops.dense_attention.ring.combine_triton import merge

    prepare_interpreter()
    for ranges in RANGES:
        parts = make_parts(SHAPES[0], ranges, torch.float32)
        right = by_softmax(parts, SHAPES[0])
        (_, sums, lse), (rows, out, part_lse), third = parts
        assert merge(sums, lse, out, part_lse, rows.start, torch.float32) is sums
        result = merge(sums, lse, *third[1:], rows.start, torch.float16)
        assert result.dtype == torch.float16
        check((result, lse), right, 1e-3)


def test_compiles_once_without_a_gpu(monkeypatch):
    kernels = pytest.importorskip(KERNELS)
    recorder = Recorder(kernels._merge)
    monkeypatch.setattr(kernels, "_merge", recorder)
    for ranges in RANGES:
        _, (rows, out, lse), _ = make_parts(SHAPES[1], ranges, torch.bfloat16)
        sums = torch.zeros(SHAPES[1], dtype=torch.bfloat16)
        kernels.merge(sums, torch.zeros(SHAPES[1][:2]), out, lse, rows.start, torch.float32)
    hashes = {assembly(recorder.kernel, *launch, 90).hash for launch in recorder.launches}
    assert len(hashes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("ranges", RANGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_on_the_gpu(shape, ranges):
    parts = make_parts(shape, ranges, torch.bfloat16)
    check(combined(parts, torch.bfloat16, "cuda"), by_softmax(parts, shape), 3e-3)


if __name__ == "__main__":
    main()
