"""Compressor pooling: torch against loops, Triton against both, and compiled Triton.

The interpreter must be chosen before the kernels are imported, so this file starts itself again
(see :func:`interpret`).
"""

import re

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.compressor import torch as unfused
from megatron_dsa.ops.compressor.spec import CompressorInputs, reference
from megatron_dsa.ops.layout.compressed import Groups
from tests.cases.triton_kernels import (
    assembly,
    assert_repeatable,
    interpret,
    prepare_interpreter,
    recorded,
)
from tests.helpers import double_leaf, leaf, relative_error

LARGE = 2**28
KERNELS = "megatron_dsa.ops.compressor.triton.launch"


def packed_groups(lengths, ratio, padding=0, slots=None):
    rows = sum(lengths) + padding
    slots = rows // ratio if slots is None else slots
    first = torch.full((slots,), -1, dtype=torch.int32)
    position, row = torch.zeros(slots, dtype=torch.int64), 0
    for length in lengths:
        for g in range(length // ratio):
            assert first[row // ratio + g] == -1
            first[row // ratio + g] = row + g * ratio
            position[row // ratio + g] = g * ratio
        row += length
    return rows, Groups(first, position, 1)


def batch_groups(seq_length, batch, ratio):
    position = torch.arange(seq_length // ratio).repeat(batch) * ratio
    element = torch.arange(batch).repeat_interleave(seq_length // ratio)
    return seq_length * batch, Groups((position * batch + element).int(), position, batch)


def covered(rows, groups, ratio):
    """Return bool ``[tokens]``: tokens in a group."""
    inside = torch.zeros(rows, dtype=torch.bool)
    for first in groups.first_token.tolist():
        if first >= 0:
            inside[first : first + ratio * groups.token_step : groups.token_step] = True
    return inside


def layouts(ratio):
    mixed = [0, 1, ratio - 1, ratio, 3 * ratio + 2, 0, 2 * ratio]
    return {
        "packed": packed_groups(mixed, ratio, padding=ratio + 3),
        "starts with a gap": packed_groups([ratio - 1, 2 * ratio, 1], ratio),
        "one sequence": packed_groups([3 * ratio + 1], ratio, slots=3),
        "batch of 1": batch_groups(2 * ratio, 1, ratio),
        "batch of 3": batch_groups(2 * ratio + 1, 3, ratio),
        "too short": packed_groups([ratio - 1, 1, 0], ratio, padding=1, slots=2),
        "no slots": packed_groups([ratio - 1], ratio, slots=0),
        "short batch": batch_groups(ratio - 1, 3, ratio),
    }


LAYOUTS = list(layouts(2))


def make_inputs(
    rows, groups, ratio, overlap, dim, *, dtype=torch.float64, device="cpu", poison=True
):
    """Draw inputs on both halves of one tensor, with large and ``-inf`` scores, NaN in gaps."""
    width = dim * (2 if overlap else 1)
    both = leaf(rows, 2 * width, seed=rows + ratio).detach()
    both[:, width:] *= 3
    if rows:
        both[::5, width:] += 60.0
        both[1::7, width : width + 3] = float("-inf")
    if poison:
        both[~covered(rows, groups, ratio)] = float("nan")
    values, scores = both.to(device, dtype).requires_grad_().split(width, 1)
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    ape = leaf(ratio, width, seed=1, device=device, dtype=accumulation)
    groups = Groups(groups.first_token.to(device), groups.position.to(device), groups.token_step)
    return CompressorInputs(values, scores, ape, groups, ratio, overlap, LARGE)


def in_double(inputs):
    leaves = (double_leaf(x) for x in (inputs.values, inputs.scores, inputs.ape))
    groups, rest = inputs.groups, (inputs.ratio, inputs.overlap, inputs.workspace_bytes)
    return CompressorInputs(*leaves, groups, *rest)


def run(compress, arguments):
    """Return ``pooled, dvalues, dscores, dape`` for a fixed upstream gradient."""
    pooled = compress(arguments)
    weight = leaf(*pooled.shape, seed=9, device=pooled.device, dtype=torch.bfloat16).detach()
    weight = weight.to(pooled.dtype)
    # Gradients of slots without a group are undefined.
    weight[arguments.groups.first_token < 0] = float("nan")
    if not pooled.requires_grad:  # without groups there is no path to the inputs
        return [pooled] + [
            torch.zeros_like(x) for x in (arguments.values, arguments.scores, arguments.ape)
        ]
    inputs = (arguments.values, arguments.scores, arguments.ape)
    grads = torch.autograd.grad(pooled, inputs, weight, materialize_grads=True)
    return [pooled.detach(), *grads]


def check(compress, inputs, tolerance):
    got, want = run(compress, inputs), run(reference, in_double(inputs))
    for name, x, y in zip(("pooled", "dvalues", "dscores", "dape"), got, want, strict=True):
        assert x.shape == y.shape
        assert relative_error(x, y) < tolerance, name
    assert got[0].dtype == got[1].dtype == got[2].dtype == inputs.values.dtype
    assert got[3].dtype == inputs.ape.dtype
    assert got[1].is_contiguous() and got[2].is_contiguous()
    gap = ~covered(inputs.values.shape[0], inputs.groups, inputs.ratio)
    assert (got[1][gap.to(got[1].device)] == 0).all() and (got[2][gap.to(got[2].device)] == 0).all()
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("ratio", "dim"), [(2, 5), (3, 8), (4, 16), (128, 3)])
def test_unfused(layout, ratio, dim, overlap):
    """Values and scores of tokens outside all groups must not be read."""
    rows, groups = layouts(ratio)[layout]
    check(unfused.compress, make_inputs(rows, groups, ratio, overlap, dim), 1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_small_workspace(overlap):
    rows, groups = layouts(4)["packed"]
    inputs = make_inputs(rows, groups, 4, overlap, 16)
    small = CompressorInputs(
        inputs.values, inputs.scores, inputs.ape, groups, 4, overlap, workspace_bytes=1
    )
    for x, y in zip(run(unfused.compress, small), run(unfused.compress, inputs), strict=True):
        assert relative_error(x, y) < 1e-14


def test_channel_without_finite_score():
    rows, groups = layouts(2)["one sequence"]
    inputs = in_double(make_inputs(rows, groups, 2, True, 4))
    with torch.no_grad():
        inputs.scores[:2, 4:6] = float("-inf")
    got = check(unfused.compress, inputs, 1e-12)
    assert (got[0][0, :2] == 0).all() and (got[0][0, 2:] != 0).all()


def test_bf16_sums_in_fp32():
    rows, groups = layouts(128)["packed"]
    check(unfused.compress, make_inputs(rows, groups, 128, False, 16, dtype=torch.bfloat16), 4e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 1}, "ratio must be at least 2"),
        ({"scores": torch.zeros(8, 7)}, "scores must be"),
        ({"values": torch.zeros(8, 8).t()}, "must be contiguous"),
        ({"ape": torch.zeros(2, 8)}, "ape must be"),
        ({"token_step": 3}, "token_step"),
    ],
)
def test_messages(change, message):
    step = change.pop("token_step", 1)
    groups = Groups(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), step)
    kwargs = {"values": torch.zeros(8, 8), "scores": torch.zeros(8, 8), "ape": torch.zeros(4, 8)}
    kwargs |= {"groups": groups, "ratio": 4, "overlap": True, "workspace_bytes": 1} | change
    with pytest.raises(ConfigError, match=message):
        CompressorInputs(**kwargs).check()


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.compressor.triton import launch as triton_kernels

    prepare_interpreter()
    cases = [(4, True, 16, layout) for layout in LAYOUTS]
    for ratio, overlap, dim in ((3, True, 48), (2, False, 16), (128, False, 80)):
        cases += [(ratio, overlap, dim, layout) for layout in ("packed", "batch of 3")]
    cases += [(5, True, 24, "packed"), (7, False, 40, "batch of 3")]
    # Positions shared by threads, with overlap.
    cases += [(17, True, 48, "batch of 3"), (40, True, 80, "packed"), (130, True, 16, "packed")]
    for ratio, overlap, dim, layout in cases:
        rows, groups = layouts(ratio)[layout]
        inputs = make_inputs(rows, groups, ratio, overlap, dim, dtype=torch.float32)
        check(triton_kernels.compress, inputs, 1e-5)
    # More blocks of slots than programs, and two blocks of channels.
    rows, groups = packed_groups([4 * 4 * 7 + 1, 5, 31], 4, padding=70)
    inputs = make_inputs(rows, groups, 4, True, 144, dtype=torch.float32)
    check(triton_kernels.compress, inputs, 1e-5)


#: 8 or 16 bytes per thread and instruction, into registers or shared memory.
WIDE_LOAD = r"ld\.global(\.L1::\w+)?\.cg\.v[24]\.b32|cp\.async\.(ca|cg)\.shared\.global.*, 0x(8|10)"
NARROW_LOAD = r"ld\.global\S*\.[bu](8|16)\b"


@pytest.mark.parametrize(
    ("ratio", "overlap", "dim"), [(4, True, 512), (4, True, 128), (128, False, 512)]
)
def test_compiles_without_a_gpu(monkeypatch, ratio, overlap, dim):
    """For Hopper and Blackwell: wide loads, and no exchange between threads for few positions."""
    launch = pytest.importorskip(KERNELS)
    names = ("pool", "pool_backward", "finish_gradients")
    forward, backward, finish = recorded(monkeypatch, launch.kernels, names)
    rows, groups = batch_groups(512, 1, ratio)
    inputs = make_inputs(rows, groups, ratio, overlap, dim, dtype=torch.bfloat16)
    launch.compress(inputs).sum().backward()
    for recorder in (forward, backward, finish):
        ((args, kwargs),) = recorder.launches
        for capability in (80, 89, 90, 100):
            ptx = assembly(recorder.kernel, args, kwargs, capability).asm["ptx"]
            assert ".local" not in ptx
            if recorder is not finish:
                # Two bf16 per load suffice with many loads in flight.
                assert re.search(WIDE_LOAD, ptx) or not re.search(NARROW_LOAD, ptx)
            if recorder is forward and ratio == 4:
                assert "shfl.sync" not in ptx and "bar.sync" not in ptx


GPU_CASES = [(4, True, 512, 4099), (4, True, 128, 70_001), (128, False, 512, 9000)]


def gpu_inputs(ratio, overlap, dim, rows, kind):
    """Draw bf16 inputs on the GPU: packed sequences with tails and padding, or a batch of 3."""
    if kind == "packed":
        lengths = [0, 1, ratio - 1, ratio, 3 * ratio + 2, rows // 3, 5, rows // 2]
        rows, groups = packed_groups(lengths, ratio, padding=rows - sum(lengths))
    else:
        rows, groups = batch_groups(rows // 3, 3, ratio)
    return make_inputs(rows, groups, ratio, overlap, dim, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["packed", "batch"])
@pytest.mark.parametrize(("ratio", "overlap", "dim", "rows"), GPU_CASES)
def test_triton_on_the_gpu(kind, ratio, overlap, dim, rows):
    kernels = pytest.importorskip(KERNELS)
    inputs = gpu_inputs(ratio, overlap, dim, rows, kind)
    got = run(kernels.compress, inputs)
    want = run(unfused.compress, in_double(inputs))
    for name, x, y in zip(("pooled", "dvalues", "dscores", "dape"), got, want, strict=True):
        assert relative_error(x, y) < 5e-3, name
    assert_repeatable(lambda: kernels.compress(inputs), (inputs.values, inputs.scores, inputs.ape))


if __name__ == "__main__":
    main()
