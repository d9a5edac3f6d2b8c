"""Groups of a step's kernel time: products, FP8 casts, this package's operations, the rest.

transformer-engine launches kernels from C++, outside of torch's operators, so they are grouped by
name. Each group lists its longest kernels, which reveals wrong matches.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks.tracing import OTHER, PRODUCTS, time_per_operation

PACKAGE, CASTS = "operations of this package", "casts"
#: Group -> pattern of kernel names; the first match counts.
KERNELS = {
    PRODUCTS: r"nvjet|gemm|cutlass|xmma|cublas",
    CASTS: r"cast|quantize|amax|swizzle|transpose|scaling|block_scale",
}
#: Kernels listed per group, and letters of each name.
NAMED, LETTERS = 3, 60
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def group_of(kernel: str) -> str:
    """Return the group of a kernel outside of this package's operations."""
    found = (group for group, names in KERNELS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(found, OTHER)


def kernel_groups(events: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    """Yield ``step/GROUP`` and its result, slow ones first, from a GPU trace's events."""
    events = list(events)
    host = [event for event in events if event.get("cat") not in _ON_GPU]
    times: Counter[str] = Counter()
    longest: dict[str, Counter[str]] = {}
    for group in (*KERNELS, OTHER):
        kernels = [e for e in events if e.get("cat") in _ON_GPU and group_of(e["name"]) == group]
        for operation, (us, *_) in time_per_operation([*host, *kernels], on_gpu=True).items():
            times[group if operation in (PRODUCTS, OTHER) else PACKAGE] += us
        longest[group] = Counter()
        for kernel in kernels:
            longest[group][kernel["name"][:LETTERS]] += kernel["dur"]
    total = sum(times.values())
    for group, us in times.most_common():
        names = [name for name, _ in longest.get(group, Counter()).most_common(NAMED)]
        yield f"step/{group}", {
            "status": "ok", "ms": us / 1e3, "repeats": 1, "ran": " + ".join(names),
            "share_of_time": us / total,
        }  # fmt: skip
