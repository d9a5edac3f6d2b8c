"""Attention layers over several GPUs of one host: context parallelism, rows against heads.

    python -m benchmarks.ranks                          # 2 GPUs, writes ranks.csv and charts
    python -m benchmarks.ranks --grids tp1cp2 --cases v3.2 --rows 65536
    python -m benchmarks.ranks --grids tp2cp1 --cases --simulate 4 8
    python -m benchmarks.ranks --charts ranks.csv       # draws the charts again

A grid has one process per GPU (:mod:`benchmarks.ranks_worker`). All ranks begin a call together and
the slowest counts. One GPU measures the same layers in the same run, and is what efficiency refers
to: its time, divided by the ranks and by their time. Communication is exposed where NCCL's kernels
run and no other kernel does. Bytes are counted where collectives are called, and stand beside what
the design says (:mod:`benchmarks.ranks_traffic`).

``--simulate TP`` compares rows and heads for more ranks than there are GPUs: the core of one of
them (:mod:`benchmarks.ranks_simulated`), and what it sends apart from that.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import time
from pathlib import Path

from benchmarks import attention
from benchmarks.ranks_cases import (
    LAYERS,
    ONE,
    SIMULATED_ROWS,
    Case,
    Grid,
    baseline,
    exchange_cases,
    layer_cases,
    simulated_cases,
)
from benchmarks.ranks_pool import Ended, Pool
from benchmarks.timing import quantile

COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "triton", "flash_mla", "cudnn_frontend",
    "cutlass_dsl", "tilelang", "package", "part", "grid", "tp", "cp", "preset", "ratio", "rows",
    "heads", "cp_layout", "tp_mode", "operation", "ran", "status", "reason", "median_ms", "p10_ms",
    "p90_ms", "efficiency", "communication_share", "exposed_share", "bytes_per_token",
    "formula_bytes_per_token", "bytes", "peak_mib", "norm_error", "warm_up_s", "repeats",
    "workspace_mib",
)  # fmt: skip
#: Of the ranks' answers, the largest; they belong to the whole step, not to its forward.
OF_STEP = (
    "communication_share", "exposed_share", "bytes_per_token", "formula_bytes_per_token",
    "peak_mib",
)  # fmt: skip
#: Outputs that differ by more than this are not outputs of the same layer. bf16 lands near 1e-3.
NORM_LIMIT = 2e-2


def merge(answers: list[dict]) -> list[dict]:
    """Put the answers of all ranks to one case together: a row per operation."""
    rows = []
    for operation in answers[0]["times"]:
        # All ranks began each call together: it took as long as the slowest.
        times = [
            max(ranks) for ranks in zip(*(a["times"][operation] for a in answers), strict=True)
        ]
        row = {
            "operation": operation,
            "status": "ok",
            "median_ms": quantile(times, 0.5),
            "p10_ms": quantile(times, 0.1),
            "p90_ms": quantile(times, 0.9),
            "repeats": len(times),
            **{name: answers[0].get(name) for name in ("heads", "bytes", "warm_up_s")},
        }
        if operation == "step":
            row["ran"] = answers[0].get("ran")
            for name in OF_STEP:
                found = [a[name] for a in answers if a.get(name) is not None]
                row[name] = max(found) if found else None
        rows.append(row)
    return rows


def norms(answers: list[dict]) -> dict[str, float]:
    """Return the norms of what all ranks have together."""
    names = answers[0].get("squares", {})
    return {name: sum(a["squares"][name] for a in answers) ** 0.5 for name in names}


class Run:
    """One invocation: its grids, where rows go, and what later rows are compared with."""

    def __init__(self, settings: dict, output: Path, timeout: float, ends_at: float, pool=Pool):
        self.settings, self.output, self.timeout = settings, output, timeout
        self.ends_at, self.pool = ends_at, pool
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment: dict = {}
        self.rows: list[dict] = []
        self._alone: dict[tuple, float] = {}  # milliseconds of one rank
        self._norms: dict[Case, dict] = {}
        self._walls: dict[tuple[Case, int], float] = {}  # seconds of whole cases

    def measure(self, plan: dict[Grid, list[Case]], gpus: int | None) -> None:
        """Measure grid after grid; all start and compile at the same time, before anything counts.

        Args:
            plan: grids and their cases, that of one rank first.
            gpus: how many there are, ``None`` on the CPU.
        """
        pools: dict[Grid, Pool | None] = {}
        try:
            for grid, cases in plan.items():
                if gpus is not None and grid.ranks > gpus:
                    reason = f"{grid.name} needs {grid.ranks} GPUs, there are {gpus}"
                    for case in cases:
                        self._record(grid, case, {"status": "skipped", "reason": reason})
                elif cases:
                    pools[grid] = self.pool(grid, self.settings, self.timeout)
            self._prepare(pools, plan)
            # Short ones first, whatever the grid: time may run out.
            todo = [(grid, case) for grid in pools for case in plan[grid]]
            todo.sort(key=lambda pair: pair[1].rows)
            while todo:
                grid, case = todo.pop(0)
                self._case(pools, grid, case)
                if pools[grid] is not None and all(other != grid for other, _ in todo):
                    pools[grid].stop()  # its memory is wanted
                    pools[grid] = None
        finally:
            for pool in filter(None, pools.values()):
                pool.stop()

    def _prepare(self, pools: dict[Grid, Pool | None], plan: dict[Grid, list[Case]]) -> None:
        """Wait until all grids are there and have compiled; what fails now fails again later."""
        for grid in list(pools):
            try:
                self.environment = pools[grid].answers()[0]["environment"]
            except Ended as error:
                del pools[grid]
                for case in plan[grid]:
                    self._record(grid, case, {"status": error.status, "reason": error.reason})
        for grid, pool in pools.items():
            shortest = {case.kind(): case for case in reversed(plan[grid])}
            pool.ask("prepare", list(shortest.values()))
        for grid in list(pools):
            try:
                pools[grid].answers()
            except Ended as error:
                print(f"{grid.name} could not prepare: {error.reason}", flush=True)
                if error.gone:
                    pools[grid] = None

    def _case(self, pools: dict[Grid, Pool | None], grid: Grid, case: Case) -> None:
        """Measure one case, in a new pool if the last one ended."""
        begin = time.time()
        needed = self._expected(case)
        if begin + needed > self.ends_at:
            left = max(0.0, self.ends_at - begin)
            reason = f"may take {needed:.0f} s, {left:.0f} s were left (--total)"
            self._record(grid, case, {"status": "skipped", "reason": reason})
            return
        try:
            if pools[grid] is None:
                pools[grid] = self.pool(grid, self.settings, self.timeout)
                self.environment = pools[grid].answers()[0]["environment"]
            pools[grid].ask("measure", [case])
            answers = pools[grid].answers()
        except Ended as error:
            if error.gone:
                pools[grid] = None
            self._record(grid, case, {"status": error.status, "reason": error.reason})
            return
        # Compilation happens once.
        compiling = max(answer.get("warm_up_s", 0.0) for answer in answers)
        self._walls[case.alone(), grid.ranks] = time.time() - begin - compiling
        compared = self._compare(case, answers)
        for row in merge(answers):
            self._record(grid, case, self._judge(grid, case, row | compared))

    def _expected(self, case: Case) -> float:
        """Return at most how many seconds a case takes; 0 if nothing like it was measured."""
        alike = [
            (other.rows, seconds)
            for (other, _), seconds in self._walls.items()
            if other.kind() == case.alone().kind() and other.rows <= case.rows
        ]
        if not alike:
            return 0.0
        rows = max(rows for rows, _ in alike)
        # Scores are formed for all pairs of rows; several ranks take less, or a trace longer.
        return max(seconds for n, seconds in alike if n == rows) * (case.rows / rows) ** 2

    def _compare(self, case: Case, answers: list[dict]) -> dict:
        """Return how far the results are from those of one rank."""
        found = norms(answers)
        if not found:
            return {}
        wanted = self._norms.setdefault(case.alone(), found)
        return {"norm_error": max(abs(found[n] - wanted[n]) / wanted[n] for n in found)}

    def _judge(self, grid: Grid, case: Case, row: dict) -> dict:
        """Add the efficiency, or say what is wrong with the result."""
        error = row.get("norm_error")
        if error is not None and not error <= NORM_LIMIT:
            reason = f"wrong result: norms differ from one rank's by {error:.3g}"
            return {"operation": row["operation"], "status": "failed", "reason": reason}
        ranks = case.simulated or grid.ranks
        key = (case.part, case.name, case.rows, row["operation"])
        if ranks == 1:
            self._alone[key] = row["median_ms"]
        if key in self._alone:
            row["efficiency"] = self._alone[key] / (ranks * row["median_ms"])
        return row

    def _record(self, grid: Grid, case: Case, result: dict) -> None:
        tp, cp = (case.simulated, 1) if case.simulated else (grid.tp, grid.cp)
        row = {
            "date": self.date, **self.environment, "part": case.part, "grid": grid.name, "tp": tp,
            "cp": cp, "preset": case.preset, "ratio": case.ratio, "rows": case.rows,
            "heads": case.heads, "cp_layout": case.cp_layout if cp > 1 else None,
            "tp_mode": case.tp_mode if tp > 1 else None,
            "workspace_mib": self.settings["workspace_mib"], **result,
        }  # fmt: skip
        attention.append_csv(self.output, row, COLUMNS)
        self.rows.append(row)
        print(describe(row), flush=True)


def describe(row: dict) -> str:
    """One line about one row."""
    ratio = "" if row["ratio"] is None else f"-r{row['ratio']}"
    how = " ".join(filter(None, (row["cp_layout"], row["tp_mode"])))
    where = f"{row['part']:9} tp{row['tp']}cp{row['cp']} {row['preset'] + ratio:13} {row['rows']:7}"
    line = f"{where} {how:17} {row.get('operation', ''):8} {row['status']:8}"
    if row["status"] != "ok":
        return f"{line} {row.get('reason', '')}"
    line += f" {row['median_ms']:9.4g} ms"
    for column, text in (("efficiency", "efficiency"), ("exposed_share", "exposed")):
        if row.get(column) is not None:
            line += f"  {text} {100 * row[column]:.1f} %"
    if row.get("bytes_per_token") is not None:
        sent, formula = row["bytes_per_token"], row["formula_bytes_per_token"]
        line += f"  {sent:.0f} B/token (formula {formula:.0f})"
    if row.get("bytes"):
        line += f"  {row['bytes'] / 2**20:.4g} MiB sent"
    if row.get("peak_mib") is not None:
        line += f"  peak {row['peak_mib']:.0f} MiB"
    return line


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
    add("--rows", nargs="+", type=int, help="of all ranks; default: depends on grid and layer")
    add("--simulate", nargs="+", type=int, default=[], metavar="TP",
        help="also compare rows and heads of one of that many tensor-parallel ranks")  # fmt: skip
    add("--repeats", type=int, help="timed calls (default 5, with --quick 2)")
    add("--budget", type=float, default=2.0, metavar="SECONDS",
        help="after that, no more repeats of an operation, but two at least (2)")  # fmt: skip
    add("--total", type=float, default=145.0, metavar="SECONDS",
        help="start no case that may end after that; it is recorded as skipped (145)")  # fmt: skip
    add("--timeout", type=float, default=180,
        help="seconds until a grid that does not answer is ended (180)")  # fmt: skip
    add("--workspace-mib", type=int, default=256, help="budget of torch implementations (256)")
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes on the CPU, for trying the benchmark")
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
    step = 128 * max(grid.ranks for grid in [ONE, *grids])
    if bad := [n for n in options.rows or () if n < step or n % step]:
        # Every rank has a group of every layer.
        parser.error(f"--rows must be positive multiples of {step} for these grids, got {bad[0]}")
    if bad := [n for n in options.simulate if n < 2 or (4 if quick else 128) % n]:
        parser.error(f"--simulate must divide the heads and be 2 at least, got {bad[0]}")
    options.plan = plan(options, [grid for grid in grids if grid != ONE])
    return options


def plan(options: argparse.Namespace, grids: list[Grid]) -> dict[Grid, list[Case]]:
    """Return the cases of every grid, one rank first."""
    found = {g: layer_cases(g, options.cases, options.rows, options.quick) for g in grids}
    alone = baseline(case for cases in found.values() for case in cases)
    preset, lengths = ("tiny", (256,)) if options.quick else ("v3.2", SIMULATED_ROWS)
    simulated = []
    if options.simulate:
        simulated = list(simulated_cases(options.simulate, options.rows or lengths, preset))
    found = {ONE: alone + simulated, **found}
    place = grids[0] if grids else ONE
    found[place] = exchange_cases(simulated) + found[place]
    return found


def gpu_count(quick: bool) -> int | None:
    """Return the number of GPUs; with ``--quick``, none is used and none is missed."""
    if quick:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes
        return None
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: --quick tries the benchmark on the CPU")
    return torch.cuda.device_count()


def draw(path: Path) -> None:
    """Draw the charts of a CSV, if there is something to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no charts: pip install matplotlib")
        return
    from benchmarks.ranks_charts import draw_ranks

    for chart in draw_ranks(path):
        print(f"wrote {chart}")


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for, then draw the charts."""
    begin = time.time()
    options = parse(argv)
    if options.charts:
        draw(options.charts)
        return
    gpus = gpu_count(options.quick)
    attention.open_csv(options.output, COLUMNS)
    settings = {name: getattr(options, name) for name in ("repeats", "budget", "workspace_mib")}
    run = Run(settings, options.output, options.timeout, begin + options.total)
    run.measure(options.plan, gpus)
    count: dict[str, int] = {}
    for row in run.rows:
        count[row["status"]] = count.get(row["status"], 0) + 1
    what = ", ".join(f"{number} {status}" for status, number in count.items())
    print(f"\n{what or 'nothing'} in {time.time() - begin:.0f} s; rows are in {options.output}")
    draw(options.output)


if __name__ == "__main__":
    main()
