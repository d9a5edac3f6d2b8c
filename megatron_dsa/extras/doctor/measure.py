"""How repeated calls are compared, and timed."""

import statistics
import time
from typing import Any

import torch


def same_bits(first, second) -> bool:
    """Whether two results (tuples of tensors or ``None``) agree in every bit, NaNs included."""
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_bytes(a), _bytes(b)):
            return False
    return True


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def dirty_memory(results) -> None:
    """Leave NaN (or a huge id) in freed memory of the sizes of ``results``.

    The next outputs are likely to be allocated there, so that one which is accumulated into
    without being zeroed, or not written everywhere, differs from the first.
    """
    blocks = [
        torch.full_like(x, float("nan") if x.is_floating_point() else 2**30, requires_grad=False)
        for x in results
        if x is not None
    ]
    del blocks


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that errors show up where they were made."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, function) -> tuple[Any, float]:
    """Return what ``function`` returns, and how long it took including the device's work."""
    synchronize(device)
    begin = time.perf_counter()
    value = function()
    synchronize(device)
    return value, time.perf_counter() - begin


def median_ms(function, enough_ms: float = 400.0, repeats: int = 9) -> float:
    """Median time of a call on the GPU, from events; slow calls are repeated less often.

    ``function`` must have been called before: compilation is not what is measured here.
    """
    times: list[float] = []
    while len(times) < repeats and sum(times) < enough_ms:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
