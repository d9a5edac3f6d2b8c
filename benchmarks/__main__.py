"""Measure a family of cases, or write the charts and pages of what was measured.

    python -m benchmarks attention                       # writes benchmarks/attention.csv
    python -m benchmarks layer --tokens 8192 --ways ours dense
    python -m benchmarks ranks --quick                   # tiny shapes, on the CPU
    python -m benchmarks layer --help                    # the options of a family
    python -m benchmarks charts                          # draws all charts from the CSVs
    python -m benchmarks pages                           # writes the tables of docs/performance.md
                                                         # anew, and build/measurements/

Every case runs in its own process. Every result is compared with float64 or with another way, and
appended to the CSV at once (columns: benchmarks/schema.py).
"""

import argparse
import importlib.util
import math
import signal
import sys
import time
from pathlib import Path

from benchmarks import appendix
from benchmarks.comparisons import with_blocks
from benchmarks.runner import Run, case_text, summary
from benchmarks.schema import case_fields, open_csv
from benchmarks.settings import FAMILIES, Settings, load

FOLDER = Path(__file__).parent


def parser_of(family: str) -> argparse.ArgumentParser:
    module = load(family)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {family}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny shapes on the CPU, for trying the benchmark")
    add("--dry-run", action="store_true", help="measure nothing, list the cases")
    add("--ways", nargs="+", help="implementations and peers, default: all")
    repeats = getattr(module, "REPEATS", 7)
    add("--repeats", type=int, help=f"timed calls, at most ({repeats}, with --quick 2)")
    add("--budget", type=float, default=5.0, metavar="SECONDS",
        help="of timed calls per measurement (5), but one call at least")  # fmt: skip
    add("--total", type=float, default=math.inf, metavar="SECONDS",
        help="start no measurement after that; what is left is recorded as skipped")  # fmt: skip
    timeout = getattr(module, "TIMEOUT", 600.0)
    add("--timeout", type=float, default=timeout, metavar="SECONDS",
        help=f"until a measurement that does not answer is ended ({timeout:g})")  # fmt: skip
    add("--workspace-mib", type=int, default=256, help="budget of torch implementations (256)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--output", type=Path, metavar="CSV",
        help=f"file to append to (benchmarks/{family}.csv; with --quick it has to be named, or "
        "nothing is kept)")  # fmt: skip
    module.add_options(parser)
    return parser


def plan_of(family: str, argv: list[str]) -> tuple[argparse.Namespace, list]:
    """Return the options of a command line, and the cases with their measurements.

    Raises:
        SystemExit: the options are invalid.
    """
    parser = parser_of(family)
    options = parser.parse_args(argv)
    try:
        plan = load(family).plan(options)
    except ValueError as error:
        parser.error(str(error))
    if options.ways:
        known = {work.way for _, works in plan for work in works}
        if unknown := sorted(set(options.ways) - known):
            parser.error(f"--ways must be among {', '.join(sorted(known))}, got {unknown[0]}")
        plan = [(case, [w for w in works if w.way in options.ways]) for case, works in plan]
    return options, [(case, works) for case, works in plan if works]


def settings_of(family: str, options: argparse.Namespace) -> Settings:
    import torch

    repeats = getattr(load(family), "REPEATS", 7)
    there = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    return Settings(
        device=options.device or there,
        repeats=options.repeats or (2 if options.quick else repeats),
        budget=options.budget,
        timeout=options.timeout,
        quick=options.quick,
    )


def measure(family: str, argv: list[str]) -> list[dict]:
    """Run the measurements of a command line; return their CSV records."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, _end)  # `timeout` sends it
    options, plan = plan_of(family, argv)
    if options.dry_run:
        for case, works in plan:
            print(case_text(case_fields(case)), *(f"\n  {part:24} {way}" for part, way in works))
        return []
    kept = not options.quick or options.output
    output = (options.output or FOLDER / f"{family}.csv") if kept else Path("/dev/null")
    if kept:
        open_csv(output)
    run = Run(family, settings_of(family, options), output, options.total)
    for case, works in plan:
        run.case(case, works)
    print("\nbest/way   median", *summary(run.rows), sep="\n")
    count = {status: sum(row["status"] == status for row in run.rows) for status in
             ("ok", "skipped", "failed")}  # fmt: skip
    what = ", ".join(f"{number} rows {status}" for status, number in count.items())
    where = f"; they are in {output}" if kept else ""
    print(f"\n{what} in {time.monotonic() - begin:.0f} s{where}")
    return run.rows


def _end(number: int, _frame) -> None:
    """Raise, so that the case's process also ends."""
    raise SystemExit(128 + number)


def charts(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks charts")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    options = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("charts need matplotlib: pip install matplotlib")
    from benchmarks.charts import draw_all

    for chart in draw_all(options.folder):
        print(f"wrote {chart}")


def pages(argv: list[str]) -> None:
    """Write the tables of docs/performance.md, and all figures as pages in build/measurements."""
    argparse.ArgumentParser(prog="python -m benchmarks pages").parse_args(argv)
    root = FOLDER.parent
    page = root / "docs" / "performance.md"
    page.write_text(with_blocks(page.read_text(encoding="utf-8"), FOLDER), encoding="utf-8")
    for path in [page, *appendix.write(root / "build" / "measurements")]:
        print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    families = "\n".join(f"{name:10} {what}" for name, what in FAMILIES.items())
    parser.epilog = f"families:\n\n{families}"
    others = {"charts": charts, "pages": pages}
    parser.add_argument("family", choices=[*FAMILIES, *others])
    family = parser.parse_args(argv[:1]).family
    if family in others:
        others[family](argv[1:])
        return 0
    return int(any(row["status"] == "failed" for row in measure(family, argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
