"""Planned and measured peak memory of a training step.

After one step of warm-up, one is measured: by torch's allocator, or without a GPU by tracking the
bytes of all tensors (:mod:`megatron_dsa.extras.planner.memory_tracker`).
"""

import gc

import torch

from benchmarks.process_groups import one_rank
from benchmarks.timing import Clock, Peak
from benchmarks.train.models import plan, trainer

PARTS = ("weights", "gradients", "optimizer", "activations", "step")


def planned_peak(memory) -> int:
    """Return the planned peak; a CPU has no workspaces of matrix products."""
    from megatron_dsa.extras.planner.memory import LIBRARIES

    return memory.peak if torch.cuda.is_available() else memory.peak - LIBRARIES


def measured(argv: list[str]) -> float:
    """Return the peak of a training step on this machine, in MiB above its start."""
    from megatron_dsa.extras.planner.command import parsed
    from megatron_dsa.extras.planner.memory_tracker import MemoryTracker

    gc.collect()
    if not torch.cuda.is_available():
        with MemoryTracker() as tracker, parsed(argv, 1, planning=False) as args:
            step = trainer(args)
            step()
            tracker.restart()
            step()
            del step
        return tracker.peak / 2**20
    torch.cuda.empty_cache()
    with Peak(Clock(torch.device("cuda"))) as peak, parsed(argv, 1, planning=False) as args:
        step = trainer(args)
        step()
        peak.restart()
        step()
        del step
    assert peak.mib is not None
    return peak.mib


def compare(argv: list[str]) -> dict:
    """Plan and measure the step of a command line; return the result."""
    memory = plan(argv).stages[0].memory  # needs its own process groups
    with one_rank():
        peak = measured(argv)
    result = {"status": "ok", "planned_mib": planned_peak(memory) / 2**20, "peak_mib": peak}
    return result | {f"{part}_mib": getattr(memory, part) / 2**20 for part in PARTS}
