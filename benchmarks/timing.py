"""Time, memory and ceilings of one call."""

from __future__ import annotations

import time

import torch

#: Written before each repeat on a GPU, to evict inputs from the L2 cache.
FLUSH_BYTES = 256 * 2**20
#: Most seconds of warm-up after the first call, and most calls.
WARM_UP = (0.3, 5)
GEMM_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}


class Clock:
    """Times and memory of calls on one device.

    ``head_start``: GPU cycles of waiting before each timed call, in which the host queues it, so
    that launches do not count.
    """

    def __init__(self, device: torch.device, head_start: int = 0):
        self.on_gpu = device.type == "cuda"
        self._head_start = head_start
        self._flush = torch.empty(
            FLUSH_BYTES if self.on_gpu else 0, dtype=torch.int8, device=device
        )

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, call) -> float:
        """Return the wall time of one call."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def milliseconds(self, call, repeats: int) -> list[float]:
        """Return times of ``repeats`` calls, each with a cold L2 cache; CUDA events on a GPU."""
        if not self.on_gpu:
            return [self.seconds(call) * 1e3 for _ in range(repeats)]
        events = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            if self._head_start:
                torch.cuda._sleep(self._head_start)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        self.wait()
        return [begin.elapsed_time(end) for begin, end in events]

    def peak_mib(self, call) -> float | None:
        """Return torch's peak memory during a call, including results, above the inputs."""
        if not self.on_gpu:
            return None
        with Peak(self) as peak:
            call()
        return peak.mib


class Peak:
    """Torch's peak memory inside a ``with``, above its start.

    ``mib`` is set at the end, ``None`` without a GPU.
    """

    def __init__(self, clock: Clock):
        self.mib: float | None = None
        self._clock = clock

    def __enter__(self) -> Peak:
        if self._clock.on_gpu:
            self._clock.wait()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return self

    def restart(self) -> None:
        """Reset the peak; keep the start."""
        if self._clock.on_gpu:
            self._clock.wait()
            torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *_) -> None:
        if self._clock.on_gpu:
            self._clock.wait()
            self.mib = (torch.cuda.max_memory_allocated() - self._before) / 2**20


def quantile(values: list[float], share: float) -> float:
    """Interpolate the quantile linearly."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def summary(times: list[float]) -> dict:
    """Return ``ms`` (the median), spread and ``repeats`` of times in ms."""
    return {
        "ms": quantile(times, 0.5),
        "p10": quantile(times, 0.1),
        "p90": quantile(times, 0.9),
        "repeats": len(times),
    }


def what_ran() -> str:
    """Name the implementations that ran since the last reset of the dispatch report."""
    from megatron_dsa.ops.dispatch import report

    return "; ".join(f"{operation}={'+'.join(counts)}" for operation, counts in report().items())


def measure(call, check, clock: Clock, repeats: int, budget: float) -> dict:
    """Check a call's result, then time it; return a result of :mod:`benchmarks.schema`.

    Args:
        call: the function to measure.
        check: its result -> the comparison, or ``None``.
        clock: of the device.
        repeats: timed calls, fewer if they would take longer than ``budget`` seconds.
        budget: seconds.
    """
    row = {}
    result = call()  # compiles, loads and tunes
    if check is not None:
        found = check(result)
        row["rel_error"] = found.worst_error
        if wrong := found.wrong():
            return row | {"status": "failed", "reason": f"wrong result: {', '.join(wrong)}"}
    del result
    row["peak_mib"] = clock.peak_mib(call)
    spent = [clock.seconds(call)]
    while sum(spent) < min(WARM_UP[0], budget / 4) and len(spent) < WARM_UP[1]:
        spent.append(clock.seconds(call))
    count = max(1, min(repeats, int(budget / min(spent))))
    return row | {"status": "ok"} | summary(clock.milliseconds(call, count))


#: Ceiling -> its metric, and the metric of a share of it.
CEILINGS = {"gemm": ("tflops", "share_of_gemm"), "copy": ("tb_per_s", "share_of_copy")}


def measure_ceiling(name: str, device: torch.device, clock: Clock, repeats: int) -> dict:
    """Measure the device's ceiling: a large bf16 matrix product, or a copy."""
    if name == "gemm":
        size = GEMM_SIZE[device.type]
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        row = measure(lambda: a @ b, None, clock, repeats, budget=5.0)
        row["tflops"] = 2 * size**3 / row["ms"] / 1e9
        return row | {"reason": f"bf16 {size} x {size} x {size}"}
    size = COPY_BYTES[device.type]
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    row = measure(lambda: target.copy_(source), None, clock, repeats, budget=5.0)
    row["tb_per_s"] = 2 * size / row["ms"] / 1e9
    return row | {"reason": f"{size // 2**20} MiB, read + written"}
