"""Kernel times of a traced step, by operation."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

_PREFIX = "megatron_dsa."
#: Name of an autograd function -> operation; backwards run outside of any range.
_BACKWARDS = {
    "_CompressBackward": "compressor_backward",
    "_NormRopeBackward": "norm_rope_backward",
    "_RotateBackward": "rotate_backward",
    "_RotateIndexBackward": "index_rotation_backward",
}
#: Counted outside of all operations: projections, mostly.
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
PRODUCTS, OTHER = "matrix products", "other"


def profiled(step, device: torch.device) -> Iterator[tuple[str, dict]]:
    """Profile one call of ``step``; yield ``step/OPERATION`` and its result, slow ones first.

    Raises:
        RuntimeError: the profiler recorded no kernels.
    """
    on_gpu = device.type == "cuda"
    found = time_per_operation(trace_of(step, on_gpu), on_gpu)
    if not found:
        raise RuntimeError("the profiler recorded no kernels")
    total = sum(microseconds for microseconds, _, _ in found.values())
    for operation, (microseconds, _, names) in sorted(found.items(), key=lambda item: -item[1][0]):
        yield f"step/{operation}", {
            "status": "ok", "ms": microseconds / 1e3, "repeats": 1, "ran": "+".join(sorted(names)),
            "share_of_time": microseconds / total if total else None,
        }  # fmt: skip


def trace_of(call, on_gpu: bool, ready=None) -> list[dict]:
    """Return the events of a trace of one call.

    Args:
        call: the function to trace.
        on_gpu: wait for the GPU before and after, and record its kernels.
        ready: called when the profiler has started, before the call.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        if ready is not None:
            ready()
        call()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(errors="replace"))["traceEvents"]


def kernel_milliseconds(call, name: str) -> float:
    """Return the time of one call's GPU kernels whose names start with ``name``.

    Raises:
        RuntimeError: the profiler recorded no such kernel.
    """
    times = [
        event["dur"] / 1e3
        for event in trace_of(call, True)
        if event.get("cat") == "kernel" and event["name"].startswith(name)
    ]
    if not times:
        raise RuntimeError(f"the profiler recorded no kernel {name}*")
    return sum(times)


def all_kernels_milliseconds(call) -> float | None:
    """Return the time of all kernels, copies and fills of one call on a GPU, ``None`` if
    unrecorded.
    """
    found = time_per_operation(trace_of(call, True), True)
    return sum(microseconds for microseconds, _, _ in found.values()) / 1e3 or None


def time_per_operation(
    events: Iterable[dict], on_gpu: bool
) -> dict[str, tuple[float, int, set[str]]]:
    """Sum the events of a trace: operation -> microseconds, kernels, implementations.

    A kernel belongs to the innermost range in which the host launched it, because the profiler's
    sums omit kernels outside of torch operators. Threads are not distinguished: the forward's waits
    while the backward's runs. On the CPU, operators stand for kernels.
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(filter(None, map(_range, events)))
    work = sorted(_kernels(events) if on_gpu else _own_times(events))
    sums: dict[str, list] = defaultdict(lambda: [0.0, 0, set()])
    implementations: dict[str, set] = defaultdict(set)
    for _, _, operation, name in ranges:
        if name:
            implementations[operation].add(name)
    around, place = [], 0
    for launched, duration in work:
        while place < len(ranges) and ranges[place][0] <= launched:
            around.append(ranges[place])
            place += 1
        around = [r for r in around if r[1] >= launched]
        ours = [r[2] for r in around if r[2] != PRODUCTS]
        operation = ours[-1] if ours else PRODUCTS if around else OTHER
        entry = sums[operation]
        entry[0] += duration
        entry[1] += 1
        # A backward has no range: it runs with the forward's implementation.
        forward = operation in _BACKWARDS.values() and operation.removesuffix("_backward")
        entry[2] = implementations[forward or operation]
    return {operation: tuple(entry) for operation, entry in sums.items()}


def _range(event: dict) -> tuple[float, float, str, str] | None:
    """Return begin, end, operation and implementation of a counted range."""
    name, kind = event["name"], event.get("cat")
    span = (event["ts"], event["ts"] + event["dur"])
    if kind == "user_annotation" and name.startswith(_PREFIX):
        return *span, *name.removeprefix(_PREFIX).split(".", 1)
    if kind == "cpu_op" and name in _BACKWARDS:
        return *span, _BACKWARDS[name], ""
    if kind == "cpu_op" and name in _PRODUCTS:
        return *span, PRODUCTS, ""
    return None


def _kernels(events: list[dict]) -> Iterator[tuple[float, float]]:
    """Yield launch time and duration of each kernel, copy and fill."""
    launches, operators = {}, {}
    for event in events:
        given = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches[given.get("correlation")] = event["ts"]
        elif event.get("cat") == "cpu_op":
            operators[given.get("External id")] = event["ts"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            given = event.get("args", {})
            launched = launches.get(given.get("correlation"))
            if launched is None:  # the surrounding operator's launch, if its own was not recorded
                launched = operators.get(given.get("External id"), float("-inf"))
            yield launched, event["dur"]


def _own_times(events: list[dict]) -> Iterator[tuple[float, float]]:
    """Yield begin and time of operators, without the operators they call."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append((event["ts"], event["dur"]))
    for operators in threads.values():
        operators.sort(key=lambda operator: (operator[0], -operator[1]))
        own, open_ones = [duration for _, duration in operators], []
        for place, (begin, duration) in enumerate(operators):
            while open_ones and sum(operators[open_ones[-1]]) <= begin:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1]] -= duration
            open_ones.append(place)
        yield from zip((begin for begin, _ in operators), own, strict=True)
