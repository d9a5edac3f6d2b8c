"""How long the cases of the benchmark over several GPUs will take, from what was measured before.

Earlier files give the estimate that is printed first; what this run has measured itself, on this
machine, goes before them and decides whether there is still time for a case.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from benchmarks.ranks_cases import ONE, Case, Grid

#: Timed calls, at least: of fewer, the median could be the straggler.
FEWEST = 3
#: Seconds until all processes are there and have compiled: imports, NCCL, cuDNN's and Triton's
#: kernels. TileLang's, of ranks with few heads, take up to a minute more on a fresh machine.
START = 45.0
#: Seconds of a case besides its calls: weights, inputs, norms, memory that is asked for anew, the
#: trace of several ranks.
SET_UP = 2.0

_Key = tuple[str, str, int, int, str]


class Costs:
    """Milliseconds of calls, by case, ranks and length.

    Args:
        repeats: timed calls; budget: seconds of them, after which only :data:`FEWEST` are made.
        files: earlier rows, the latest last; files that are not there are left out.
    """

    def __init__(self, repeats: int, budget: float, files: Iterable[Path] = ()):
        self._repeats, self._budget = repeats, budget
        self._earlier: dict[_Key, dict[int, float]] = {}
        self._own: dict[_Key, dict[int, float]] = {}
        for path in files:
            if path.exists():
                self._read(path)

    def _read(self, path: Path) -> None:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["status"] == "ok":
                    ratio = f"-r{row['ratio']}" if row["ratio"] else ""
                    key = (row["part"], row["preset"] + ratio, int(row["tp"]), int(row["cp"]))
                    found = self._earlier.setdefault((*key, row["operation"]), {})
                    found[int(row["rows"])] = float(row["median_ms"])

    def learn(self, case: Case, grid: Grid, operation: str, ms: float) -> None:
        """Keep what this run has measured: ``ms`` of one layer."""
        key = _key(case, case.sharding(grid), operation)
        self._own.setdefault(key, {})[case.rows] = ms

    def seconds(self, case: Case, grid: Grid) -> float | None:
        """Return how many seconds a case may take; ``None`` if nothing like it was measured."""
        total = SET_UP
        for operation in ("exchange",) if case.part == "exchange" else ("forward", "step"):
            ms = self._milliseconds(case, grid, operation)
            if ms is None:
                return None
            once = ms / 1e3 * case.layers
            calls = min(self._repeats, max(FEWEST, math.ceil(self._budget / once))) if once else 0
            if operation == "step":
                calls += 1 if grid == ONE else 2  # the first one, and the one that is traced
            total += calls * once
        return total

    def _milliseconds(self, case: Case, grid: Grid, operation: str) -> float | None:
        where = case.sharding(grid)
        # Of several ranks, one can have twice the mean of the work, and all wait for it.
        for known in (self._own, self._earlier):
            for ranks, factor in ((where, 1.0), (ONE, 2.0 / where.ranks)):
                found = known.get(_key(case, ranks, operation))
                if found:
                    return factor * _scaled(found, case.rows)
        return None


def _key(case: Case, ranks: Grid, operation: str) -> _Key:
    return (case.part, case.name, ranks.tp, ranks.cp, operation)


def _scaled(found: dict[int, float], rows: int) -> float:
    """Milliseconds of ``rows``, at most, from the nearest length that was measured.

    Scores are formed for all pairs of rows, everything else for all rows.
    """
    shorter = [n for n in found if n <= rows]
    if shorter:
        return found[max(shorter)] * (rows / max(shorter)) ** 2
    return found[min(found)] * rows / min(found)
