"""Planned peak memory of a training step beside what it takes.

One step settles, one is measured: by torch's allocator, or, on a machine without a GPU, by
following the bytes of all tensors (:mod:`megatron_dsa.tools.planner.memory_tracker`).
"""

from __future__ import annotations

import gc

import torch

from benchmarks.process_groups import one_rank
from benchmarks.train.models import trainer

PARTS = ("weights", "gradients", "optimizer", "activations", "step")


def planned(argv: list[str]):
    """Return the planned :class:`~megatron_dsa.tools.planner.memory.RankMemory`."""
    from megatron_dsa.dispatch.gpus import GPU, GPUS, gpu_here
    from megatron_dsa.tools.planner.command import plan_of

    gpu = GPUS[gpu_here()] if torch.cuda.is_available() else GPU("CPU", None, 1e3)
    return plan_of(argv, 1, gpu).stages[0].memory


def planned_peak(memory) -> int:
    """Return the planned peak; a CPU has no workspaces of matrix products."""
    from megatron_dsa.tools.planner.memory import LIBRARIES

    return memory.peak if torch.cuda.is_available() else memory.peak - LIBRARIES


class Peak:
    """The most bytes that torch holds inside of the context, on top of what was there before."""

    def __enter__(self) -> Peak:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated()
            return self
        from megatron_dsa.tools.planner.memory_tracker import MemoryTracker

        self._tally = MemoryTracker()
        self._tally.__enter__()
        return self

    def settled(self) -> None:
        """Count from here on."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._tally.restart()

    def __exit__(self, *error) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self._tally.__exit__(*error)
            self.bytes = self._tally.peak


def measured(argv: list[str]) -> int:
    """Return the peak bytes of a training step on this machine."""
    from megatron_dsa.tools.planner.command import parsed

    with Peak() as peak, parsed(argv, 1, planning=False) as args:
        step = trainer(args)
        step()
        peak.settled()
        step()
        del step
    return peak.bytes


def compare(argv: list[str]) -> dict:
    """Plan and measure the step of a command line; return the result."""
    memory = planned(argv)  # needs process groups of its own
    with one_rank():
        peak = measured(argv)
    result = {"status": "ok", "planned_mib": planned_peak(memory) / 2**20, "peak_mib": peak / 2**20}
    return result | {f"{part}_mib": getattr(memory, part) / 2**20 for part in PARTS}
