"""One run of a family: every case in its own process, results appended to a CSV at once.

A measurement ends as ``ok``, ``skipped`` (the way has a reason) or ``failed`` (error, out of
memory, crash, wrong result). If the process of a case dies (:mod:`benchmarks.child`), the
measurement under way has failed, and the others continue in a new process.
"""

import contextlib
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.schema import append_csv, case_fields, long_rows
from benchmarks.settings import Settings, Work

ROOT = Path(__file__).resolve().parents[1]
CHILD = (sys.executable, "-P", "-m", "benchmarks.child")


class Run:
    """One invocation: settings, output, and the results so far.

    Args:
        family: name of the cases' family.
        settings: of all cases.
        output: a CSV with the schema's header.
        total: seconds after which no measurement starts; the rest is skipped.
        child: the command that serves requests.
    """

    def __init__(
        self, family: str, settings: Settings, output: Path, total: float = math.inf, child=CHILD
    ):
        self.family, self.settings, self.output, self.child = family, settings, output, child
        self.ends_at = time.monotonic() + total
        self.rows: list[dict] = []
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        # A process that never starts reports no machine.
        self._head: dict = {"date": now, "family": family, "gpu": "", "versions": {}}

    def case(self, case, works: list[Work]) -> None:
        """Run all measurements of a case, with as many processes as needed."""
        todo = list(works)
        while todo:
            if time.monotonic() > self.ends_at:
                for work in todo:
                    self._complain(case, work, "skipped", "the time was over (--total)")
                return
            done, under_way, ending = self._child(case, todo)
            if under_way is not None:
                self._complain(case, todo[under_way], "failed", ending)
                done.add(under_way)
            if not done:  # it failed before the first measurement, and would again
                for work in todo:
                    self._complain(case, work, "failed", ending)
                return
            todo = [work for place, work in enumerate(todo) if place not in done]

    def _child(self, case, todo: list[Work]) -> tuple[set[int], int | None, str]:
        """Run one process; return the finished indices, the index under way when it ended, and the
        end.
        """
        request = {
            "family": self.family, "case": asdict(case), "works": todo,
            "settings": asdict(self.settings),
        }  # fmt: skip
        if self.ends_at < math.inf:
            request["seconds"] = max(0.0, self.ends_at - time.monotonic())
        done, under_way, timed_out = set(), None, threading.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(
                self.child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=self._variables(), text=True, start_new_session=True,
            )  # fmt: skip

            def stop():
                timed_out.set()
                _kill(process)

            try:
                _hand_over(process, json.dumps(request))
                for line in _within(process.stdout, self.settings.timeout, stop):
                    if not line.endswith("\n"):
                        break  # it died while writing
                    event = json.loads(line)
                    kind, place = event.pop("event"), event.pop("place", None)
                    if kind == "environment":
                        self._head |= event
                    elif kind == "rows":
                        self._record(case, event["rows"])
                    elif kind == "start":
                        under_way = place
                    else:
                        done.add(place)
                        under_way = None
                code = process.wait()
            finally:
                _kill(process)
                process.wait()
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
        if timed_out.is_set():
            return done, under_way, f"no answer within {self.settings.timeout:g} s (--timeout)"
        ending = f"process ended by signal {-code}" if code < 0 else f"process ended with {code}"
        return done, under_way, f"{ending}: {lines[-1][:500]}" if lines else ending

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = os.environ | {"PYTHONPATH": path}
        if self.settings.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""  # Megatron uses any visible GPU
        return variables

    def _complain(self, case, work: Work, status: str, reason: str) -> None:
        rows = long_rows(work.part, {"status": status, "reason": reason})
        self._record(case, [{"way": work.way, **row} for row in rows])

    def _record(self, case, rows: list[dict]) -> None:
        whole = [self._head | {"case": case_fields(case)} | row for row in rows]
        append_csv(self.output, whole)
        self.rows += whole
        if whole:
            print(describe(whole), flush=True)


def _kill(process: subprocess.Popen) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _hand_over(process: subprocess.Popen, text: str) -> None:
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died before reading; its exit status has the reason


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


def case_text(case: dict) -> str:
    return " ".join(
        f"{name}={value}" for name, value in case.items() if name != "workspace_mib"
    )  # fmt: skip


def describe(rows: list[dict]) -> str:
    row = rows[0]
    line = f"{case_text(row['case'])} | {row['part']:24} {row['way']:16} {row['status']:8}"
    values = [f"{r['metric']} {r['value']}" for r in rows if r["value"] is not None]
    texts = [*values, row.get("reason"), row.get("ran")]
    return "  ".join(filter(None, [line, *texts]))


def summary(rows: list[dict]) -> list[str]:
    """Return a line per measurement: its time, and the time of the case's fastest way relative to
    it.
    """
    parts: dict[tuple, list[dict]] = {}
    for row in rows:
        # Kernels of a profiled step are not alternatives.
        if row["status"] == "ok" and row["metric"] == "ms" and "/" not in row["part"]:
            parts.setdefault((case_text(row["case"]), row["part"]), []).append(row)
    lines = []
    for (case, part), found in parts.items():
        best = min(float(row["value"]) for row in found)
        for row in sorted(found, key=lambda row: float(row["value"])):
            ms = float(row["value"])
            lines.append(f"{best / ms if ms else 1:6.3f}  {ms:10.4g} ms  {part:24} "
                         f"{row['way']:20} {case}")  # fmt: skip
    return lines
