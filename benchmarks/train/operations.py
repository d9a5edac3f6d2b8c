"""Planned and executed floating-point operations of a training step.

The plan is ``--dsa-dry-run``'s: each mathematically required product once. Executed operations are
read from the tensor cores' hardware counter with Nsight Compute, for one step after two of warm-up,
of kernels whose names indicate products. They include masked parts of tiles, padding and
recomputation, which a plan omits. A matrix product of known size checks the counter's unit in every
step. About a minute per case.

Needs ``ncu`` on the PATH and the right to read hardware counters.
"""

import csv
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.process_groups import one_rank
from benchmarks.train.models import plan, trainer
from megatron_dsa.errors import ImplementationError

METRIC = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
#: Size of the product that checks the counter. No product of a model has a factor 7.
KNOWN = 3584
#: Seconds for one case.
LIMIT = 300

WEIGHTS = "products with weights"
#: Groups of planned parts; the rest are products with weights.
PARTS = {
    "attention": "attention",
    "window attention": "attention",
    "index scores": "index scores",
    "indexer loss": "indexer loss",
}
#: Group -> pattern of kernel names; the first match counts.
KERNELS = {
    "attention": r"_mla_|masked_attention|sparse_attn|sdpa|flash|fmha",
    "index scores": r"index_scores",
    "indexer loss": r"indexer_loss|dense_teacher|head_sums|head_lse|student_|(query|key)_gradient",
    WEIGHTS: r"nvjet|gemm|cutlass",
}


def group_of(kernel: str) -> str:
    return next((name for name, pattern in KERNELS.items() if re.search(pattern, kernel)), WEIGHTS)


def counted(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Return the names and counts in ncu's log (``--csv --page raw``), in order.

    Raises:
        ValueError: there is no table with the counter in it.
    """
    # The program's own output surrounds the table.
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    if METRIC not in (rows.fieldnames or ()):
        raise ValueError(f"ncu counted no {METRIC}: does this GPU have it?")
    next(rows)  # units
    return [(row["Kernel Name"], int(float(row[METRIC].replace(",", "")))) for row in rows]


def operations_per_count(known: int) -> int:
    """Return the operations per count, from the known product's.

    Raises:
        ValueError: neither an operation nor a multiply-add.
    """
    unit = 2 * KNOWN**3 / known if known else 0
    if min(abs(unit - 1), abs(unit - 2)) > 0.02:
        raise ValueError(f"ncu counted {known} for a product of 2 x {KNOWN}^3 operations")
    return round(unit)


def by_group(kernels: list[tuple[str, int]]) -> Counter[str]:
    """Return the operations of a step's kernels by group; the first is the known product."""
    (_, known), *others = kernels
    operations: Counter[str] = Counter()
    for name, count in others:
        operations[group_of(name)] += operations_per_count(known) * count
    return operations


def planned(argv: list[str]) -> Counter[str]:
    """Return the operations of a step by group, as ``--dsa-dry-run`` counts them."""
    made, groups = plan(argv), Counter()
    for part, operations in made.operations.items():
        groups[PARTS.get(part, WEIGHTS)] += operations * made.args.global_batch_size
    return groups


def run_step(argv: list[str]) -> None:
    """Run three steps; the profiler sees the known product and the last step."""
    from megatron_dsa.extras.planner.command import parsed

    a = torch.randn(KNOWN, KNOWN, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    with one_rank(), parsed(argv, 1, planning=False) as args:
        step = trainer(args)
        step()
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.mm(a, a)
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile(argv: list[str]) -> list[tuple[str, int]]:
    """Run a step of a case under ncu; return the counted kernels in order.

    Raises:
        RuntimeError: it failed, with its output as text, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder, "ncu.csv"), Path(folder, "said.txt")
        ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", METRIC]
        ncu += ["--profile-from-start", "off", "--log-file", str(log)]
        ncu += ["--kernel-name-base", "demangled"]
        ncu += ["--kernel-name", "regex:" + "|".join(KERNELS.values())]
        # Nothing is timed: clocks and caches stay as they are.
        ncu += ["--clock-control", "none", "--cache-control", "none"]
        step = [sys.executable, "-m", "benchmarks.train.operations", *argv]
        with said.open("w") as file:
            try:
                status = subprocess.run(
                    [*ncu, *step], stdout=file, stderr=file, timeout=LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"none after {LIMIT} s"
        text = log.read_text() if log.exists() else ""
        if status:
            raise RuntimeError(f"status {status}: {(said.read_text() + text)[-1500:]}")
    return counted(text.splitlines(keepends=True))


def compare(argv: list[str]) -> Iterator[tuple[str, dict]]:
    """Plan and count the step of a command line; yield a result per group, and one of all.

    Raises:
        ImplementationError: there is no ncu.
    """
    if shutil.which("ncu") is None:
        raise ImplementationError("ncu (Nsight Compute) is not on the PATH")
    yield from results(planned(argv), by_group(profile(argv)))


def results(expected: Counter[str], executed: Counter[str]) -> Iterator[tuple[str, dict]]:
    """Yield groups and their operations, planned and executed."""
    sums = {group: (expected[group], executed[group]) for group in expected | executed}
    sums["all"] = expected.total(), executed.total()
    for group, (count, ran) in sums.items():
        yield group, {"status": "ok", "planned_gflop": count / 1e9, "executed_gflop": ran / 1e9}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    run_step(sys.argv[1:])
