"""One run of the benchmark over several GPUs: processes, rows, and what these are compared with."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from benchmarks import attention
from benchmarks.ranks_cases import Case, Grid
from benchmarks.ranks_costs import Costs
from benchmarks.ranks_pool import Ended, Pool
from benchmarks.timing import summary

COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "triton", "flash_mla", "cudnn_frontend",
    "cutlass_dsl", "tilelang", "package", "part", "grid", "tp", "cp", "preset", "ratio", "rows",
    "heads", "layers", "cp_layout", "tp_mode", "collectives", "operation", "ran", "status",
    "reason", "median_ms", "p10_ms", "p90_ms", "efficiency", "communication_share",
    "exposed_share", "bytes_per_token", "formula_bytes_per_token", "hidden_bytes_per_token",
    "bytes", "peak_mib", "norm_error", "warm_up_s", "repeats", "workspace_mib",
)  # fmt: skip
#: Of the ranks' answers, the largest; they belong to the whole step, not to its forward.
OF_STEP = (
    "communication_share", "exposed_share", "bytes_per_token", "formula_bytes_per_token",
    "hidden_bytes_per_token", "peak_mib",
)  # fmt: skip
#: Outputs that differ by more than this are not outputs of the same layer. bf16 lands near 1e-3.
NORM_LIMIT = 2e-2


def slowest(answers: list[dict], operation: str) -> list[float]:
    """Milliseconds of every call: all ranks began it together, it took as long as the slowest."""
    return [max(ranks) for ranks in zip(*(a["times"][operation] for a in answers), strict=True)]


def merge(answers: list[dict]) -> list[dict]:
    """Put the answers of all ranks to one case together: a row per operation."""
    rows = []
    for operation in answers[0]["times"]:
        row = {
            "operation": operation,
            "status": "ok",
            **summary(slowest(answers, operation)),
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


def identity(grid: Grid, case: Case) -> dict:
    """Return the columns that say what is measured."""
    ranks = case.sharding(grid)
    layer = case.part == "layers"
    return {
        "part": case.part, "grid": grid.name, "tp": ranks.tp, "cp": ranks.cp,
        "preset": case.preset, "ratio": case.ratio, "rows": case.rows, "heads": case.heads,
        "layers": case.layers if layer else None,
        "cp_layout": case.cp_layout if ranks.cp > 1 else None,
        "tp_mode": case.tp_mode if ranks.tp > 1 else None,
        "collectives": case.collectives if layer and ranks.ranks > 1 else None,
    }  # fmt: skip


class Run:
    """One invocation: its grids, where rows go, and what later rows are compared with."""

    def __init__(
        self, settings: dict, output: Path, timeout: float, ends_at: float, costs: Costs, pool=Pool
    ):
        self.settings, self.output, self.timeout = settings, output, timeout
        self.ends_at, self.costs, self.pool = ends_at, costs, pool
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment: dict = {}
        self.rows: list[dict] = []
        self._alone: dict[tuple, float] = {}  # milliseconds of one rank
        self._norms: dict[Case, dict] = {}

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
        begin = time.time()
        for grid in list(pools):
            try:
                self.environment = pools[grid].answers()[0]["environment"]
            except Ended as error:
                del pools[grid]
                for case in plan[grid]:
                    self._record(grid, case, {"status": error.status, "reason": error.reason})
        there = time.time()
        for grid, pool in pools.items():
            shortest = {case.compiled(): case for case in reversed(plan[grid])}
            pool.ask("prepare", list(shortest.values()))
        for grid in list(pools):
            try:
                pools[grid].answers()
            except Ended as error:
                print(f"{grid.name} could not prepare: {error.reason}", flush=True)
                if error.gone:
                    pools[grid] = None
        compiled = time.time()
        took = f"{there - begin:.0f} s to start, {compiled - there:.0f} s to compile"
        print(f"{took}, {self.ends_at - compiled:.0f} s left (--total)", flush=True)

    def _case(self, pools: dict[Grid, Pool | None], grid: Grid, case: Case) -> None:
        """Measure one case, in a new pool if the last one ended."""
        left = max(0.0, self.ends_at - time.time())
        needed = self.costs.seconds(case, grid) or 0.0
        if left == 0 or needed > left:
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
        compared = self._compare(case, answers)
        for row in merge(answers):
            self.costs.learn(case, grid, row["operation"], row["median_ms"])
            self._record(grid, case, self._judge(grid, case, row | compared))

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
        ranks = case.sharding(grid).ranks
        key = (case.part, case.name, case.rows, row["operation"])
        if ranks == 1:
            self._alone[key] = row["median_ms"]
        if key in self._alone:
            row["efficiency"] = self._alone[key] / (ranks * row["median_ms"])
        return row

    def _record(self, grid: Grid, case: Case, result: dict) -> None:
        row = {
            "date": self.date, **self.environment, **identity(grid, case),
            "workspace_mib": self.settings["workspace_mib"], **result,
        }  # fmt: skip
        attention.append_csv(self.output, row, COLUMNS)
        self.rows.append(row)
        print(describe(row), flush=True)


def place(row: dict) -> str:
    """What a row is about, of the same width for all."""
    name = row["preset"] if row["ratio"] is None else f"{row['preset']}-r{row['ratio']}"
    if (row["layers"] or 1) > 1:
        name += f" x{row['layers']}"
    plain = "plain" if row["collectives"] == "plain" else None
    how = " ".join(filter(None, (row["cp_layout"], row["tp_mode"], plain)))
    return f"{row['part']:9} tp{row['tp']}cp{row['cp']} {name:16} {row['rows']:7} {how:17}"


def describe(row: dict) -> str:
    """One line about one row."""
    line = f"{place(row)} {row.get('operation', ''):8} {row['status']:8}"
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
