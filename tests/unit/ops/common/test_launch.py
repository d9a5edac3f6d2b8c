"""Launches of Triton kernels by this package's key."""

import itertools

import pytest
import torch

from tests.cases.triton_kernels import Recorder

VALUES = [0, 1, 2, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**63, 0.5, 1.0, None, True]


def test_key_separates_what_triton_compiles_apart():
    """The key must separate Triton's classes of arguments."""
    launch = pytest.importorskip("megatron_dsa.ops.common.launch")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    data = torch.zeros(64, dtype=torch.uint8)
    skip = -data.data_ptr() % 16
    tensors = [
        data[skip + first : skip + first + 8].view(dtype)
        for first in (0, 8, 16)
        for dtype in (torch.float32, torch.int32, torch.int64, torch.bfloat16)
    ]
    for a, b in itertools.combinations([*VALUES, *tensors], 2):
        keys = [launch._key((x,), {}) for x in (a, b)]
        known = [native_specialize_impl(backend, x, False, True, True) for x in (a, b)]
        assert None in keys or keys[0] != keys[1] or known[0] == known[1], (a, b)
    assert launch._key((1,), {"A": 1}) != launch._key((1,), {"B": 1})
    assert launch._key((1,), {"A": 1}) != launch._key((1,), {"A": 2})
    assert launch._key((True,), {}) is None


def test_other_kernels_launch_by_themselves():
    launch = pytest.importorskip("megatron_dsa.ops.common.launch").launch
    recorder = Recorder(None)
    launch(recorder, (3,), 1, 2.0, A=4)
    assert recorder.launches == [((1, 2.0), {"A": 4})]


@pytest.mark.gpu
def test_same_results_as_triton():
    from megatron_dsa.ops.common import launch as module
    from megatron_dsa.ops.masked_attention.triton.numbers import _numbers

    for queries, heads, shift in itertools.product((1, 16, 130), (1, 3, 16), (0, 1)):
        lse = torch.randn(queries * heads + shift, device="cuda")[shift:].view(queries, heads)
        count = -(-queries // 128) * 128
        grid, rest = (count // 64, heads), {"DIMS": 0, "BLOCK": 64}
        results = [lse.new_full((heads, 2, count), 7.0) for _ in range(3)]
        _numbers[grid](lse, None, None, results[0], queries, heads, count, **rest)
        for result in results[1:]:
            module.launch(_numbers, grid, lse, None, None, result, queries, heads, count, **rest)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert (results[0][:, 0] != 7).all() and (results[0][:, 1] == 7).all()
    assert _numbers.__dict__["_megatron_dsa_compiled"]
