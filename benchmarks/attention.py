"""Speed of the sparse-attention operations, of every implementation that can run here.

    python benchmarks/attention.py                         # all presets, writes attention.csv
    python benchmarks/attention.py --quick                 # one preset, one length
    python benchmarks/attention.py --preset v3.2 --skv 8192 --operation forward backward
    python benchmarks/attention.py --charts attention.csv  # draws the charts again

A measurement is an operation with named implementations; it ends as ``ok``, ``skipped`` (the
implementation says why it cannot) or ``failed`` (error, out of memory, crash, wrong result), and
its row is appended to the CSV at once. Measurements of the same shape and index distribution share
a child process (:mod:`benchmarks.measure`). If that dies, the one under way is recorded as failed
and the others go on in a new process.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from megatron_dsa.ops import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.cases import (  # noqa: E402
    DEFAULT_PRESETS,
    PARTS,
    PRESETS,
    Group,
    Measurement,
    groups,
    measurements,
)

CHILD = (sys.executable, "-P", "-m", "benchmarks.measure")
#: Kernels of other projects that ours are compared with.
PEERS = frozenset({"flashmla", "cudnn"})
COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "flash_mla", "cudnn_frontend", "cutlass_dsl",
    "tilelang", "package", "preset", "heads", "qk_dim", "v_dim", "topk", "sink", "index_heads",
    "index_dim", "queries", "skv", "distribution", "neighbour_share", "operation",
    "implementation", "status", "reason", "median_ms", "p10_ms", "p90_ms", "tflops", "tb_per_s",
    "share_of_gemm", "peak_mib", "rel_error", "warm_up_s", "repeats", "workspace_mib",
)  # fmt: skip


def open_csv(path: Path, columns: tuple[str, ...] = COLUMNS) -> None:
    """Write the header of a new file, or refuse a file that has another one."""
    if path.exists() and path.stat().st_size > 0:
        with path.open(newline="") as file:
            found = tuple(next(csv.reader(file)))
        if found != columns:
            odd = sorted(set(found) ^ set(columns)) or ["their order"]
            raise SystemExit(
                f"--output {path} has other columns than this version writes (differing: "
                f"{', '.join(odd)}): name a new file or move that one away."
            )
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(columns)


def append_csv(path: Path, row: dict, columns: tuple[str, ...] = COLUMNS) -> None:
    """Append one row; what it lacks stays empty, what the schema lacks is an error."""
    with path.open("a", newline="") as file:
        csv.DictWriter(file, columns).writerow({key: _short(row.get(key)) for key in row})


def _short(value):
    """Numbers with five significant digits: more would be noise."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


class Run:
    """One invocation: settings, where rows go, and the rows so far."""

    def __init__(self, settings: dict, output: Path, timeout: float, child=CHILD):
        self.settings, self.output, self.timeout, self.child = settings, output, timeout, child
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment: dict = {}
        self.rows: list[dict] = []
        self._gemm: float | None = None

    def group(self, group: Group, todo: list[Measurement]) -> None:
        """Record one row per measurement, with as many child processes as that takes."""
        todo, self._gemm = list(todo), None
        while todo:
            done, under_way, ending = self._child(group, todo)
            if under_way is not None:
                self._record(group, todo[under_way], {"status": "failed", "reason": ending})
                done.add(under_way)
            if not done:  # it never got as far as a measurement; it would not the next time
                for m in todo:
                    self._record(group, m, {"status": "failed", "reason": ending})
                return
            todo = [m for place, m in enumerate(todo) if place not in done]

    def _request(self, group: Group, todo: list[Measurement]) -> dict:
        """Return what the child is asked for."""
        return {
            "group": asdict(group),
            "measurements": [m.as_dict() for m in todo],
            "settings": self.settings,
        }

    def _child(self, group: Group, todo: list[Measurement]):
        """Run one process; return places done, the place under way when it ended, and the end."""
        request = self._request(group, todo)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done, under_way, timed_out = set(), None, threading.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(
                self.child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=os.environ | {"PYTHONPATH": path}, text=True,
            )  # fmt: skip

            def stop():
                timed_out.set()
                process.kill()

            try:
                _hand_over(process, json.dumps(request))
                for line in _within(process.stdout, self.timeout, stop):
                    if not line.endswith("\n"):
                        break  # it died while it was writing
                    event = json.loads(line)
                    kind, place = event.pop("event"), event.pop("place", None)
                    if kind == "environment":
                        self.environment = event
                    elif kind == "start":
                        under_way = place
                    elif kind == "row":  # one of several
                        self._record(group, todo[place], event)
                    else:
                        self._record(group, todo[place], event)
                        done.add(place)
                        under_way = None
                code = process.wait()
            finally:
                process.kill()
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
        if timed_out.is_set():
            return done, under_way, f"no answer within {self.timeout:g} s (--timeout)"
        ending = f"process ended by signal {-code}" if code < 0 else f"process ended with {code}"
        return done, under_way, f"{ending}: {lines[-1][:500]}" if lines else ending

    def _record(self, group: Group, m: Measurement, result: dict) -> None:
        preset = PRESETS[group.preset]
        if m.operation == "gemm":
            self._gemm = result.get("tflops")
        row = {
            "date": self.date,
            **self.environment,
            "preset": group.preset,
            **{name: value for name, value in asdict(preset).items() if name in COLUMNS},
            "queries": group.queries,
            "skv": group.skv,
            "distribution": group.distribution,
            "operation": m.operation,
            "implementation": m.label,
            "workspace_mib": self.settings["workspace_mib"],
            **result,
        }
        if self._gemm and row.get("tflops"):
            row["share_of_gemm"] = row["tflops"] / self._gemm
        append_csv(self.output, row)
        self.rows.append(row)
        print(describe(row), flush=True)


def _hand_over(process: subprocess.Popen, text: str) -> None:
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died before reading; its exit status tells


def _within(lines: Iterable[str], seconds: float, stop) -> Iterable[str]:
    """Yield lines, calling ``stop`` if the next one takes longer than ``seconds``."""
    lines = iter(lines)
    while True:
        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            line = next(lines)
        except StopIteration:
            return
        finally:
            timer.cancel()
        yield line


def describe(row: dict) -> str:
    """One line about one row."""
    where = f"{row['preset']:9} {row['skv']:7} {row['distribution']:14}"
    line = f"{where} {row['operation']:9} {row['implementation']:12} {row['status']:8}"
    if row["status"] != "ok":
        return f"{line} {row.get('reason', '')}"
    rates = {"tflops": "TFLOP/s", "tb_per_s": "TB/s"}
    rate = "  ".join(f"{row[key]:8.4g} {unit}" for key, unit in rates.items() if row.get(key))
    error = "" if row.get("rel_error") is None else f"  error {row['rel_error']:.1e}"
    return f"{line} {row['median_ms']:9.4g} ms  {rate}{error}"


def is_peer(implementation: str) -> bool:
    """Whether all fused parts of an implementation are another project's."""
    parts = set(implementation.split("+"))
    return bool(parts & PEERS) and parts <= PEERS | {"torch"}


def summary(rows: list[dict]) -> list[str]:
    """Lines of a table: speed relative to the best peer (without one: to the best of all)."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["status"] == "ok" and row["operation"] in PARTS:
            key = tuple(row[name] for name in ("preset", "skv", "distribution", "operation"))
            cases.setdefault(key, []).append(row)
    lines = [
        f"{'x best peer':>11}  {'preset':9} {'Skv':>7} {'distribution':14} {'operation':9} "
        f"{'implementation':16} {'ms':>9} {'TFLOP/s':>8} {'error':>8}"
    ]
    for (preset, skv, distribution, operation), found in cases.items():
        peers = [row for row in found if is_peer(row["implementation"])]
        best = min(row["median_ms"] for row in peers or found)
        mark = " " if peers else "*"
        for row in sorted(found, key=lambda row: row["median_ms"]):
            lines.append(
                f"{best / row['median_ms']:10.3f}{mark}  {preset:9} {skv:7} {distribution:14} "
                f"{operation:9} {row['implementation']:16} {row['median_ms']:9.4g} "
                f"{row['tflops']:8.4g} {row['rel_error']:8.1e}"
            )
    if any(line[10:11] == "*" for line in lines[1:]):
        lines.append("* no peer ran: relative to the fastest of all")
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", nargs="+", choices=PRESETS, help=f"default: {' '.join(DEFAULT_PRESETS)}")
    add("--skv", nargs="+", type=int, help="keys; default: 8192 32768 131072")
    add("--distribution", nargs="+", default=["random", "clustered"],
        help="of the selected keys: random, sorted, clustered or clustered:SHARE (of keys that "
        "the next query keeps); default: random clustered")  # fmt: skip
    add("--operation", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--impl", nargs="+", help="implementations, default: all that exist")
    add("--queries", type=int, default=4096, help="the last of the keys' positions (4096)")
    add("--repeats", type=int, help="timed calls (default 30, with --quick 5)")
    add("--budget", type=float, help="seconds of timed calls per measurement (10, --quick 2)")
    add("--timeout", type=float, default=600, help="seconds until a measurement is ended (600)")
    add("--workspace-mib", type=int, default=256, help="budget of torch implementations (256)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="v3.2 with 8192 keys, few repeats")
    add("--charts", type=Path, metavar="CSV", help="measure nothing, draw the charts of a file")
    options = parser.parse_args(argv)
    quick = options.quick
    options.preset = options.preset or (["v3.2"] if quick else list(DEFAULT_PRESETS))
    options.skv = options.skv or ([8192] if quick else [8192, 32768, 131072])
    options.repeats = options.repeats or (5 if quick else 30)
    options.budget = options.budget or (2.0 if quick else 10.0)
    options.groups = groups(options.preset, options.skv, options.distribution, options.queries)
    for reason in filter(None, (group.reason() for group in options.groups)):
        parser.error(reason)
    return options


def draw(path: Path, function: str = "charts.draw_charts") -> None:
    """Draw the charts of a CSV, if there is something to draw with.

    ``function`` names what draws them: ``module.function`` of this package, which returns paths.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no charts: pip install matplotlib")
        return
    module, name = function.split(".")
    for chart in getattr(importlib.import_module(f"benchmarks.{module}"), name)(path):
        print(f"wrote {chart}")


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for, print a table, draw the charts."""
    options = parse(argv)
    if options.charts:
        draw(options.charts)
        return

    import torch

    known = {
        part: [candidate.name for candidate in OPERATIONS[part].candidates]
        for parts in PARTS.values()
        for part in parts
    }
    names = sorted({name for found in known.values() for name in found})
    if unknown := sorted(set(options.impl or ()) - set(names)):
        raise SystemExit(f"--impl must be among {', '.join(names)}, got {', '.join(unknown)}")
    open_csv(options.output)
    settings = {
        "device": options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "repeats": options.repeats,
        "budget": options.budget,
        "workspace_mib": options.workspace_mib,
    }
    this = Run(settings, options.output, options.timeout)
    todo = measurements(options.operation, known.__getitem__, options.impl)
    for group in options.groups:
        this.group(group, todo)
    print("\n" + "\n".join(summary(this.rows)) + f"\n\nrows are in {options.output}")
    draw(options.output)


if __name__ == "__main__":
    main()
