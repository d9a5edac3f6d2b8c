"""Planned peak memory of training steps beside what they take on this GPU.

    python -m benchmarks.memory

Whole small models of V3.2's and V4's attention, built as the entry point does, with Megatron's data
parallel wrapper and optimizer: two microbatches, one step to settle, one that is measured
(``torch.cuda.max_memory_allocated``). ``--tiny``: tiny models; on a machine without a GPU the bytes
of all tensors are followed instead (:mod:`megatron_dsa.tools.planner.memory_tracker`).
"""

from __future__ import annotations

import argparse
import csv
import gc
import logging
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.training_step import CASES, command, one_rank, trainer

OUTPUT = Path(__file__).with_suffix(".csv")
COLUMNS = (
    "date", "gpu", "torch", "megatron_core", "case", "tokens", "weights_mib", "gradients_mib",
    "optimizer_mib", "activations_mib", "step_mib", "planned_mib", "measured_mib", "ratio",
)  # fmt: skip


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


def main(argv: list[str] | None = None) -> list[dict]:
    """Plan and measure all cases; print a table and return (and append) its rows."""
    from megatron_dsa.versions import installed_version

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial of this script")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers from 0 (default: all)")
    parser.add_argument("--output", type=Path, help=f"CSV to append to ({OUTPUT}; tiny: none)")
    options = parser.parse_args(argv)
    output = options.output or (None if options.tiny else OUTPUT)
    numbers = range(len(CASES)) if options.cases is None else options.cases
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "megatron_core": installed_version("megatron-core"),
    }
    print(f"{'case':44}{'tokens':>8}{'planned':>11}{'measured':>11}  MiB   ratio  seconds")
    rows = []
    # A process each: what is left of one model would count in the next one's favour.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number in numbers:
            begin = time.perf_counter()
            try:
                row = facts | pool.submit(compare, number, options.tiny).result()
            except Exception as error:  # the other cases are measured all the same
                print(f"{CASES[number][0]:44} failed: {error}", flush=True)
                continue
            rows.append(row)
            print(
                f"{row['case']:44}{row['tokens']:>8}{row['planned_mib']:>11}"
                f"{row['measured_mib']:>11}{row['ratio']:>13.3f}"
                f"{time.perf_counter() - begin:>9.1f}",
                flush=True,
            )
    if output is not None:
        write(output, rows)
    return rows


def compare(number: int, tiny: bool) -> dict:
    """Plan and measure a case; return what its row says of it."""
    from megatron_dsa.patches import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    argv = command(*CASES[number][1:], tiny)
    memory = planned(argv)  # needs process groups of its own
    with one_rank():
        peak = measured(argv)
    row = {
        "case": CASES[number][0],
        "tokens": argv[argv.index("--seq-length") + 1],
        "planned_mib": round(planned_peak(memory) / 2**20, 1),
        "measured_mib": round(peak / 2**20, 1),
        "ratio": round(planned_peak(memory) / peak, 4),
    }
    for part in ("weights", "gradients", "optimizer", "activations", "step"):
        row[f"{part}_mib"] = round(getattr(memory, part) / 2**20, 1)
    return row


def write(output: Path, rows: list[dict]) -> None:
    """Append rows to a CSV, with a header if it is new."""
    new = not output.exists()
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
