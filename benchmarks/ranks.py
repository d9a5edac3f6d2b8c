"""Attention layers over several GPUs of one host: context parallelism, rows against heads.

    python -m benchmarks.ranks                          # 2 GPUs, writes ranks.csv and charts
    python -m benchmarks.ranks --grids tp1cp4 --cases v3.2 --rows 65536 131072 --dry-run
    python -m benchmarks.ranks --grids tp1cp4 --cases v4-flash-r4 --variants zigzag --layers 4
    python -m benchmarks.ranks --grids tp2cp1 --cases --simulate 4 8
    python -m benchmarks.ranks --charts ranks.csv       # draws the charts again

A grid has one process per GPU (:mod:`benchmarks.ranks_worker`). All ranks begin a call together and
the slowest counts. One GPU measures the same layers in the same run, and is what efficiency refers
to: its time, divided by the ranks and by their time. Communication is exposed where NCCL's kernels
run and no other kernel does. Bytes are counted where collectives are called, and stand beside what
the design says (:mod:`benchmarks.ranks_traffic`).

Variants of context parallelism are ``zigzag`` and ``contiguous``, which say who holds what, and
``plain``: zigzag, with every collective waited for where it is launched
(:mod:`benchmarks.ranks_plain`). What is not measured is a gather of hidden states, from which every
rank projects all keys: ``hidden_bytes_per_token`` says what it would send, 4 bytes per grad_proxy of a
token to each other rank (28672 for 7168 channels; keys of V3.2 and their gradients are 4224).

``--layers N`` measures N layers in a chain (:mod:`benchmarks.ranks_layer`); times and bytes are
those of one, memory that of all.

``--simulate TP`` compares rows and heads for more ranks than there are GPUs: the core of one of
them (:mod:`benchmarks.ranks_simulated`), and what it sends apart from that.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks import attention
from benchmarks.ranks_cases import (
    CP_VARIANTS,
    LAYERS,
    ONE,
    SIMULATED_ROWS,
    TP_VARIANTS,
    Case,
    Grid,
    baseline,
    exchange_cases,
    layer_cases,
    simulated_cases,
    variants_of,
)
from benchmarks.ranks_costs import START, Costs
from benchmarks.ranks_run import COLUMNS, Run, identity, place

CHARTS = "ranks_charts.draw_ranks"
#: Files of earlier runs, which estimates of time start from.
EARLIER = ("ranks.csv", "ranks_4gpus.csv")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``plan`` of the result says which grid measures what."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--grids", nargs="*", metavar="GRID", default=["tp1cp2", "tp2cp1"],
        help="of several ranks, default: tp1cp2 tp2cp1; one rank is measured always")  # fmt: skip
    add("--cases", nargs="*", choices=list(LAYERS), help="layers, default: all but tiny ones")
    add("--variants", nargs="+", choices=[*CP_VARIANTS, *TP_VARIANTS],
        help="of context-parallel grids: zigzag contiguous plain, of the others: heads rows; "
        "default: all, contiguous and plain of some lengths only")  # fmt: skip
    add("--rows", nargs="+", type=int, help="of all ranks; default: depends on grid and layer")
    add("--layers", type=int, default=1, metavar="N",
        help="in a chain, so that the host is ahead of the GPU as in a model (1)")  # fmt: skip
    add("--simulate", nargs="+", type=int, default=[], metavar="TP",
        help="also compare rows and heads of one of that many tensor-parallel ranks")  # fmt: skip
    add("--repeats", type=int, help="timed calls (default 5, with --quick 2)")
    add("--budget", type=float, default=2.0, metavar="SECONDS",
        help="after that, no more repeats of an operation, but three at least (2)")  # fmt: skip
    add("--total", type=float, default=240.0, metavar="SECONDS",
        help="start no case that may end after that; it is recorded as skipped (240)")  # fmt: skip
    add("--timeout", type=float, default=180,
        help="seconds until a grid that does not answer is ended (180)")  # fmt: skip
    add("--workspace-mib", type=int, default=256, help="budget of torch implementations (256)")
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes on the CPU, for trying the benchmark")
    add("--dry-run", action="store_true", help="measure nothing, list the cases and their seconds")
    add("--charts", type=Path, metavar="CSV", help="measure nothing, draw the charts of a file")
    options = parser.parse_args(argv)
    quick = options.quick
    if options.cases is None:
        options.cases = [name for name in LAYERS if name.startswith("tiny") == quick]
    options.repeats = options.repeats or (2 if quick else 5)
    try:
        grids = [Grid.parse(text) for text in options.grids]
    except ValueError as error:
        parser.error(f"--grids: {error}")
    grids = [grid for grid in grids if grid != ONE]
    step = 128 * max((grid.ranks for grid in grids), default=1)
    if bad := [n for n in options.rows or () if n < step or n % step]:
        # Every rank has a group of every layer.
        parser.error(f"--rows must be positive multiples of {step} for these grids, got {bad[0]}")
    if bad := [n for n in options.simulate if n < 2 or (4 if quick else 128) % n]:
        parser.error(f"--simulate must divide the heads and be 2 at least, got {bad[0]}")
    if bad := [grid for grid in grids if not variants_of(grid, options.variants)]:
        known = ", ".join(variants_of(bad[0]))
        parser.error(f"--variants must have one of {known} for the grid {bad[0].name}")
    if options.layers < 1:
        parser.error(f"--layers must be positive, got {options.layers}")
    options.plan = plan(options, grids)
    return options


def plan(options: argparse.Namespace, grids: list[Grid]) -> dict[Grid, list[Case]]:
    """Return the cases of every grid, one rank first."""
    given = options.cases, options.rows, options.quick, options.variants, options.layers
    found = {grid: layer_cases(grid, *given) for grid in grids}
    alone = baseline(case for cases in found.values() for case in cases)
    preset, lengths = ("tiny", (256,)) if options.quick else ("v3.2", SIMULATED_ROWS)
    simulated = []
    if options.simulate:
        simulated = list(simulated_cases(options.simulate, options.rows or lengths, preset))
    found = {ONE: alone + simulated, **found}
    where = grids[0] if grids else ONE
    found[where] = exchange_cases(simulated) + found[where]
    return found


def estimate(plan: dict[Grid, list[Case]], costs: Costs, total: float) -> list[str]:
    """Lines that say how long every case may take, and all of them together."""
    lines, known, unknown = [], 0.0, 0
    for grid, cases in plan.items():
        for case in cases:
            seconds = costs.seconds(case, grid)
            known += seconds or 0.0
            unknown += seconds is None
            text = "unknown" if seconds is None else f"{seconds:4.0f} s"
            lines.append(f"{place(identity(grid, case))} {text}")
    text = f"about {START + known:.0f} s of {total:.0f} s (--total), {START:.0f} s of it to start"
    if unknown:
        text += f"; how long {unknown} of {len(lines)} cases take is unknown"
    return [*lines, text]


def gpu_count(quick: bool) -> int | None:
    """Return the number of GPUs; with ``--quick``, none is used and none is missed."""
    if quick:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes
        return None
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: --quick tries the benchmark on the CPU")
    return torch.cuda.device_count()


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for, then draw the charts."""
    begin = time.time()
    options = parse(argv)
    if options.charts:
        attention.draw(options.charts, CHARTS)
        return
    folder = Path(__file__).parent
    earlier = [*(folder / name for name in EARLIER), options.output]
    costs = Costs(options.repeats, options.budget, dict.fromkeys(earlier))
    lines = estimate(options.plan, costs, options.total)
    print("\n".join(lines if options.dry_run else lines[-1:]), flush=True)
    if options.dry_run:
        return
    gpus = gpu_count(options.quick)
    attention.open_csv(options.output, COLUMNS)
    settings = {name: getattr(options, name) for name in ("repeats", "budget", "workspace_mib")}
    run = Run(settings, options.output, options.timeout, begin + options.total, costs)
    run.measure(options.plan, gpus)
    count: dict[str, int] = {}
    for row in run.rows:
        count[row["status"]] = count.get(row["status"], 0) + 1
    what = ", ".join(f"{number} {status}" for status, number in count.items())
    print(f"\n{what or 'nothing'} in {time.time() - begin:.0f} s; rows are in {options.output}")
    attention.draw(options.output, CHARTS)


if __name__ == "__main__":
    main()
