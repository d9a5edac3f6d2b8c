"""A run: a crash costs one measurement, ratios are within a process; command line."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from benchmarks import child
from benchmarks.__main__ import main, plan_of
from benchmarks.child import Case as Process
from benchmarks.child import complaint
from benchmarks.rows import read_csv
from benchmarks.runner import ROOT, Run, summary
from benchmarks.schema import open_csv
from benchmarks.settings import FAMILIES, Settings, Work
from megatron_dsa.errors import ImplementationError


@dataclass(frozen=True)
class Case:
    tokens: int = 8
    ratio: int | None = None


WORKS = [Work(name, "torch") for name in ("forward", "backward", "teacher")]

#: Imitates benchmarks.child without measuring.
CHILD = """
import json, os, sys, time
request = json.load(sys.stdin)
def send(**event):
    print(json.dumps(event), flush=True)
{before}
send(event="environment", gpu="test GPU", driver=None, versions={{"torch": "1.2"}})
for place, (part, way) in enumerate(request["works"]):
    send(event="start", place=place)
    if part == "backward":
        print("illegal address", file=sys.stderr, flush=True)
        {end}
    row = dict(way=way, part=part, metric="ms", value="2.0", status="ok")
    send(event="rows", rows=[row | dict(repeats=request["settings"]["repeats"])])
    send(event="done", place=place)
"""


def run_with(tmp_path, *, before="", end="pass", timeout=20, **more):
    process = (sys.executable, "-c", CHILD.format(before=before, end=end))
    output = tmp_path / "rows.csv"
    open_csv(output)
    run = Run("layer", Settings("cpu", timeout=timeout), output, child=process, **more)
    run.case(Case(), WORKS)
    return read_csv(output)


@pytest.mark.parametrize(
    ("end", "timeout", "reason"),
    [
        ("os.abort()", 20, "process ended by signal 6: illegal address"),
        ("sys.exit(3)", 20, "process ended with 3: illegal address"),
        ("os.write(1, b'{'); os.abort()", 20, "process ended by signal 6: illegal address"),
        ("time.sleep(60)", 1, "no answer within 1 s (--timeout)"),
    ],
)
def test_a_death_costs_one_measurement(tmp_path, end, timeout, reason):
    rows = {row["part"]: row for row in run_with(tmp_path, end=end, timeout=timeout)}
    assert set(rows) == {"forward", "backward", "teacher"}
    assert rows["backward"]["status"] == "failed" and rows["backward"]["reason"] == reason
    assert rows["backward"]["value"] is None and rows["backward"]["way"] == "torch"
    assert rows["forward"]["status"] == rows["teacher"]["status"] == "ok"
    assert {row["gpu"] for row in rows.values()} == {"test GPU"}
    assert rows["forward"]["case"] == {"tokens": 8} and rows["forward"]["repeats"] == 5


def test_a_child_that_never_starts_fails_all(tmp_path):
    rows = run_with(tmp_path, before="sys.exit('no driver')")
    assert {(row["status"], row["reason"]) for row in rows} == {
        ("failed", "process ended with 1: no driver")
    }
    assert len(rows) == 3


#: A command line whose child reports and continues.
STOPPED = """
import functools, sys
import benchmarks.__main__ as command
child = "import os, time; open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); time.sleep(60)"
command.Run = functools.partial(command.Run, child=(sys.executable, "-c", child))
command.main(["csa", "--quick"])
"""


def test_the_process_of_a_case_ends_with_the_command(tmp_path):
    file = tmp_path / "pid"
    command = subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=ROOT, env=os.environ | {"PID_FILE": str(file)}
    )
    try:
        _until(lambda: file.exists() and file.read_text(), 60)
        child = int(file.read_text())
        command.terminate()
        assert command.wait(20) == 128 + signal.SIGTERM
    finally:
        command.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def _until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the child did not start"
        time.sleep(0.05)


def test_what_there_is_no_time_for_is_skipped(tmp_path):
    rows = run_with(tmp_path, total=-1)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("skipped", "the time was over (--total)")
    ] * 3


def test_a_process_begins_nothing_after_its_time(tmp_path, monkeypatch):
    told = "open({!r}, 'w').write(str(request.get('seconds')))"
    for total, path in ((50, tmp_path / "a"), (None, tmp_path / "b")):
        more = {} if total is None else {"total": total}
        path.mkdir()
        run_with(path, before=told.format(str(path / "told")), **more)
    assert 40 < float((tmp_path / "a" / "told").read_text()) <= 50
    assert (tmp_path / "b" / "told").read_text() == "None"

    monkeypatch.setattr(child, "load", lambda _: Family(("step", {"status": "ok", "ms": 1.0})))
    for seconds, expected in ((60, "ok"), (-1, "skipped"), (None, "ok")):
        events = []
        request = {
            "family": "layer", "case": {}, "works": [["step", "ours"]],
            "settings": vars(Settings("cpu")),
        } | ({} if seconds is None else {"seconds": seconds})  # fmt: skip
        child.serve(request, events.append)
        (row,) = [
            row for event in events if event["event"] == "rows" for row in event["rows"]
            if row["way"] == "ours" and row["metric"] == "ms"
        ]  # fmt: skip
        assert (row["status"], row["part"]) == (expected, "step")
        assert events[-1] == {"event": "done", "place": 0}


class Family:
    """Half as fast as a ceiling measured in the same process."""

    Case, CEILINGS, ON_DEVICE = Case, ("gemm",), False

    def __init__(self, *results):
        self.results = results

    def prepare(self, case, device, settings):
        return SimpleNamespace(measure=lambda work: iter(self.results))


def test_a_share_is_of_the_same_process(monkeypatch):
    monkeypatch.setattr(child, "measure_ceiling", lambda *_: {"status": "ok", "tflops": 50.0})
    family = Family(("forward", {"status": "ok", "tflops": 25.0}))
    process = Process(family, Case(), Settings("cpu"))
    ((_, without),) = process.results(WORKS[0])
    assert "share_of_gemm" not in without
    assert list(process.ceilings()) == [("gemm", {"status": "ok", "tflops": 50.0})]
    ((_, result),) = process.results(WORKS[0])
    assert result["share_of_gemm"] == 0.5


def test_errors_are_kept_apart():
    errors = ImplementationError("no"), RuntimeError("out of memory\nadvice\nmore")
    found = [complaint(error) for error in errors]
    assert [(row["status"], row["reason"]) for row in found] == [
        ("skipped", "no"), ("failed", "RuntimeError: out of memory"),
    ]  # fmt: skip


def test_an_error_of_a_measurement_is_its_result():
    def fails(case, device, settings):
        raise torch_error

    torch_error = RuntimeError("inputs do not fit")
    family = Family()
    family.prepare = fails
    ((part, result),) = Process(family, Case(), Settings("cpu")).results(WORKS[1])
    assert part == "backward" and result["reason"] == "RuntimeError: inputs do not fit"


def test_summary_compares_ways_of_a_case():
    def row(part, way, ms, status="ok", tokens=8):
        return {"case": {"tokens": tokens}, "part": part, "way": way, "metric": "ms",
                "value": ms, "status": status}  # fmt: skip

    lines = summary(
        [
            row("backward", "torch", "40.0"), row("backward", "cudnn", "4.0"),
            row("backward", "own", "2.0"), row("backward", "own", "1.0", tokens=16),
            row("forward", "flashmla", None, status="failed"), row("step/other", "own", "1.0"),
        ]
    )  # fmt: skip
    found = [(line.split()[0], *line.split()[3:]) for line in lines]
    assert found == [
        ("1.000", "backward", "own", "tokens=8"), ("0.500", "backward", "cudnn", "tokens=8"),
        ("0.050", "backward", "torch", "tokens=8"), ("1.000", "backward", "own", "tokens=16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--skv", "2000"], "--skv must be at least the number of queries"),
        (["attention", "--distributions", "clustered:1"], "0 <= SHARE < 1"),
        (["csa", "--tokens", "4096", "200"], "multiples of 128, got 200"),
        (["indexer", "--ways", "nothing"], "--ways must be among"),
        (["ranks", "--grids", "cp2"], "a grid must be tp<ranks>cp<ranks>"),
        (["ranks", "--tokens", "8192", "300"], "multiples of 256, got 300"),
        (["ranks", "--grids", "tp1cp1"], "a grid of several ranks"),
        (["ranks", "--chain", "0"], "must be positive, got 0"),
        (["train", "--kinds", "convergence", "--steps", "30"], "a multiple of 12"),
        (["train", "--kinds", "run", "--steps", "5"], "--steps must be above 5, got 5"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_lists_the_cases(family, capsys):
    assert main([family, "--dry-run"]) == 0
    listed = capsys.readouterr().out
    _, plan = plan_of(family, [])
    assert len(plan) == len({case for case, _ in plan})
    assert len(plan) == listed.count("tokens=") + listed.count("queries=")
