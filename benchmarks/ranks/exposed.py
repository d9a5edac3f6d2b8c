"""Shares of a traced step in which ranks communicate, and in which they only communicate."""

from collections.abc import Iterable

#: Name of the traced range.
STEP = "benchmarks.ranks step"


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def outside(intervals, others) -> float:
    others = list(others)
    return length(union([*intervals, *others])) - length(union(others))


def communication_shares(events: Iterable[dict]) -> dict:
    """Return the shares of a traced step in which NCCL runs, and in which only NCCL runs.

    The step is the range :data:`STEP`, up to the end of its last kernel. NCCL's kernels also wait
    for slower ranks, so these shares include that wait.
    """
    events = [event for event in events if event.get("ph") == "X"]
    begins = [e["ts"] for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if not begins:
        raise RuntimeError(f"the profiler recorded no range {STEP!r}")
    ours, others = [], []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["ts"] >= begins[0]:
            end = event["ts"] + event["dur"]
            (ours if event["name"].startswith("nccl") else others).append((event["ts"], end))
    if not others:
        raise RuntimeError("the profiler recorded no kernels")
    first = min(begin for begin, _ in ours + others)
    span = max(end for _, end in ours + others) - first
    return {
        "communication_share": length(union(ours)) / span,
        "exposed_share": outside(ours, others) / span,
    }
