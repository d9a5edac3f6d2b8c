"""Traces: kernels are attributed to their launching operation."""

import pytest

from benchmarks import tracing


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_kernels_belong_to_the_range_that_launched_them():
    events = [
        event("user_annotation", "megatron_dsa.sparse_attention_forward.flashmla", 100, 50),
        event("user_annotation", "megatron_dsa.key_lists.triton", 110, 10),
        event("gpu_user_annotation", "megatron_dsa.key_lists.triton", 400, 500),
        event("user_annotation", "megatron_dsa.compressor.triton", 10, 20),
        event("cpu_op", "_CompressBackward", 200, 50, **{"External id": 7}),
        event("cpu_op", "aten::mm", 300, 10),
        # Products inside an operation belong to it.
        event("cpu_op", "aten::mm", 130, 10),
        event("cuda_runtime", "cudaLaunchKernel", 112, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 125, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 131, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 305, 1, correlation=5),
        event("cuda_runtime", "cudaMemsetAsync", 350, 1, correlation=6),
        event("cuda_driver", "cuLaunchKernelEx", 12, 1, correlation=8),
        # Long after its launch; some launches have no event.
        event("kernel", "lists", 1000, 2.0, correlation=1),
        event("kernel", "attention", 1010, 30.0, correlation=2),
        event("kernel", "gemm", 1050, 4.0, correlation=3),
        event("kernel", "backward", 1060, 8.0, correlation=4, **{"External id": 7}),
        event("kernel", "gemm", 1070, 16.0, correlation=5),
        event("gpu_memset", "fill", 1090, 1.0, correlation=6),
        event("kernel", "pooling", 990, 5.0, correlation=8),
        {"ph": "M", "name": "process_name"},
    ]
    assert tracing.time_per_operation(events, on_gpu=True) == {
        "key_lists": (2.0, 1, {"triton"}),
        "sparse_attention_forward": (34.0, 2, {"flashmla"}),
        "compressor": (5.0, 1, {"triton"}),
        "compressor_backward": (8.0, 1, {"triton"}),
        "matrix products": (16.0, 1, set()),
        "other": (1.0, 1, set()),
    }


def test_own_times_add_up():
    events = [
        event("cpu_op", "a", 0, 100),
        event("cpu_op", "b", 0, 40),
        event("cpu_op", "c", 10, 20),
        event("cpu_op", "d", 50, 50),
        event("cpu_op", "e", 100, 5),
    ]
    times = list(tracing._own_times(events))
    assert times == [(0, 10), (0, 20), (10, 20), (50, 50), (100, 5)]
    assert tracing.time_per_operation(events, on_gpu=False) == {"other": (105.0, 5, set())}


def test_kernels_of_a_name_are_added_up(monkeypatch):
    events = [
        event("kernel", "attention_backward", 10, 2000.0),
        event("kernel", "attention_backward", 20, 500.0),
        event("kernel", "fill", 30, 4000.0),
        event("cpu_op", "attention_backward", 5, 100),
        {"ph": "M", "name": "process_name"},
    ]
    monkeypatch.setattr(tracing, "trace_of", lambda call, on_gpu: events)
    assert tracing.kernel_milliseconds(None, "attention_") == 2.5
    with pytest.raises(RuntimeError, match="no kernel lists"):
        tracing.kernel_milliseconds(None, "lists")


def test_all_kernels_of_a_replay_are_added_up(monkeypatch):
    """One launch of a graph; fills count, host events do not."""
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 5, 100, correlation=1),
        event("kernel", "attention", 10, 2000.0, correlation=1),
        event("kernel", "gemm", 20, 500.0, correlation=1),
        event("gpu_memset", "fill", 30, 4.0, correlation=1),
    ]
    monkeypatch.setattr(tracing, "trace_of", lambda call, on_gpu: events)
    assert tracing.all_kernels_milliseconds(None) == pytest.approx(2.504)
    del events[1:]
    assert tracing.all_kernels_milliseconds(None) is None
