"""Times, memory and trace shares of a forward and a step on several ranks.

All ranks start every call together; the slowest of each call counts.
"""

import time

import torch

from benchmarks.ranks.exposed import STEP, communication_shares
from benchmarks.timing import Clock, Peak, what_ran
from benchmarks.tracing import trace_of
from megatron_dsa.ops.dispatch import reset_report

#: With fewer timed calls, the median could be an outlier.
FEWEST = 3


def agree(wish: bool, device: torch.device) -> bool:
    """Return whether all ranks agree; a barrier."""
    flag = torch.tensor(float(wish), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag.item())


def timed(call, clock: Clock, device: torch.device, repeats: int, budget: float) -> list[float]:
    """Return milliseconds of calls that all ranks start together, equally many on all."""
    times: list[float] = []
    begin = time.perf_counter()
    while agree(
        len(times) < min(FEWEST, repeats)
        or (len(times) < repeats and time.perf_counter() - begin < budget),
        device,
    ):
        times += clock.milliseconds(call, 1)
    return times


def measured(forward, step, clock: Clock, device: torch.device, settings: dict) -> dict:
    """Time both calls; return the answer's ``times``, ``ran`` and ``peak_mib`` (of the step)."""
    limits = clock, device, settings["repeats"], settings["budget"]
    times = {"forward": timed(forward, *limits)}
    reset_report()
    with Peak(clock) as peak:
        times["step"] = timed(step, *limits)
    return {"times": times, "ran": what_ran(), "peak_mib": peak.mib}


def traced_shares(call, clock: Clock, device: torch.device) -> dict:
    """Trace one call that all ranks start together; see :func:`communication_shares`."""

    def ready() -> None:
        agree(True, device)  # ranks differ in the profiler's start-up time
        clock.wait()

    def step() -> None:
        with torch.profiler.record_function(STEP):
            call()

    return communication_shares(trace_of(step, True, ready))
