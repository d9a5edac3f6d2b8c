"""Held-out losses of the runs of ``all.sh``, gaps to the continued dense model, probes.

``python table.py RUN_DIR --warmup-steps N --tokens-per-step N`` reads ``RUN_DIR/RUN`` and prints
tables: gaps by position, probes, losses. Gaps are in nats per token at equal tokens, with the
standard error over documents, not over seeds. A frozen warm-up does not update the model, so gaps
are also given at equal updates: to the dense model as many steps earlier as the warm-up took.
``mass`` is the last logged share of dense attention's probability on the selected keys; ``ms`` the
median step time. It writes ``validation.csv``, ``measures.csv``, ``documents.csv``,
``training.csv`` (step times and mass, as logged) and, with tensorboard, ``layers.csv`` to
``RUN_DIR``.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from held_out import gaps

from megatron_dsa.training.files.whole import whole_file

RUNS = (
    "dense",
    "dense_on",
    "dense_on_again",
    "warmup",
    "sparse",
    "sparse_without_warmup",
    "scratch",
    "v4",
)
REFERENCE = "dense_on"
#: Names of runs after a warm-up, with number of selected keys and variant.
SHARE = r"q\d+(?:h\d+)?"
WARMED = re.compile(
    rf"sparse(?:_(\d+))?(?:_(again|absorbed|masked|fp8|fp8_scores|frozen|{SHARE}))?"
)
LINE = re.compile(
    r"validation-held_out loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+) \|"
)

STEP = re.compile(
    r"iteration +(\d+)(?:/ *\d+)? \|.*?elapsed time per iteration \(ms\): (\S+)"
    r"(?:.*?dsa attention mass captured: (\S+))?"
)
#: Column of ``layers.csv`` -> TensorBoard tag per layer.
LAYERS = {"mass": "dsa/mass-captured", "indexer_loss": "dsa/indexer-loss"}

#: (document, band) -> sum of losses and number of tokens.
Sums = dict[tuple[int, str], tuple[float, int]]


def losses(log: str) -> dict[int, float]:
    """Return a log's validation losses by step, the last of repeated steps."""
    return {int(step): float(value) for step, value in LINE.findall(log)}


def training_steps(log: str) -> dict[int, tuple[float, float | None]]:
    """Return milliseconds per step and captured mass, if any, by logged step."""
    return {
        int(step): (float(time), float(mass) if mass else None)
        for step, time, mass in STEP.findall(log)
    }


def runs_of(folder: Path) -> list[str]:
    """Return the runs that have a log, in table order."""
    found = {file.parent.name for file in folder.glob("*/train.log")}
    others = [name for name in found if name not in RUNS and WARMED.fullmatch(name)]
    others.sort(key=warmed)
    warmups = sorted(name for name in found if re.fullmatch(f"warmup_{SHARE}", name))
    at, end = RUNS.index("warmup") + 1, RUNS.index("sparse") + 1
    return [
        name
        for name in (*RUNS[:at], *warmups, *RUNS[at:end], *others, *RUNS[end:])
        if name in found
    ]


def warmed(name: str) -> tuple[float, str]:
    """Return a sort key of runs after a warm-up: most keys first, then by variant."""
    found = WARMED.fullmatch(name)
    assert found
    return -float(found[1] or "inf"), found[2] or ""


def read(file: Path) -> list[dict[str, str]]:
    """Read a CSV; return no entries if it is absent."""
    if not file.is_file():
        return []
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def write(file: Path, columns: Iterable[str], rows: Iterable[Iterable]) -> None:
    with whole_file(file) as path, open(path, "w", newline="", encoding="utf-8") as opened:
        csv.writer(opened, lineterminator="\n").writerows([list(columns), *map(list, rows)])


def document_sums(rows: list[dict[str, str]]) -> dict[int, Sums]:
    found: dict[int, Sums] = {}
    for row in rows:
        of_step = found.setdefault(int(row["step"]), {})
        key = (int(row["document"]), row["band"])
        of_step[key] = (float(row["loss_sum"]), int(row["tokens"]))
    return found


def compared(name: str, last: int, warmup_steps: int) -> list[int]:
    """Return the dense model's steps to compare a run's last step with."""
    if name == REFERENCE:
        return []
    return [last, last - warmup_steps] if WARMED.fullmatch(name) else [last]


def gap(mine: dict[int, Sums], theirs: dict[int, Sums], step: int, other: int) -> dict[str, str]:
    """Format the gaps with their errors by band and for ``all``; empty if not measured."""
    if step not in mine or other not in theirs:
        return {}
    found = gaps(mine[step], theirs[other])
    return {part: f"{value:+.4f} ± {error:.4f}" for part, (value, error) in found.items()}


def table(
    curves: dict[str, dict[int, float]], documents: dict[str, dict[int, Sums]],
    masses: dict[str, float], times: dict[str, float], warmup_steps: int,
) -> list[str]:  # fmt: skip
    """Return the lines of the loss table; ``times`` are in milliseconds per step."""
    dense = curves.get(REFERENCE, {})
    lines = ["| run | step | held-out loss | gap | to step | mass | ms |", "|" + "---|" * 7]
    for name, curve in curves.items():
        last = max(curve)
        mass = f"{masses[name]:.3f}" if name in masses else ""
        ms = f"{times[name]:.0f}" if name in times else ""
        start, end = f"| {name} | {last} | {curve[last]:.4f} |", f"| {mass} | {ms} |"
        rows = []
        for step in compared(name, last, warmup_steps):
            if step not in dense:
                continue
            apart = curve[last] - dense[step]
            text = gap(documents.get(name, {}), documents.get(REFERENCE, {}), last, step)
            text = text.get("all", f"{apart:+.4f}")
            rows.append(f"{start} {text} ({apart / dense[step]:+.2%}) | {step} {end}")
        lines += rows or [f"{start} | {end}"]
    return lines


def position_table(documents: dict[str, dict[int, Sums]]) -> list[str]:
    """Return the lines of the gap table, by position at equal tokens."""
    theirs = documents.get(REFERENCE, {})
    rows = {}
    for name, mine in documents.items():
        if name != REFERENCE and mine and (found := gap(mine, theirs, max(mine), max(mine))):
            rows[name] = found
    if not rows:
        return []
    bands = [band for band in next(iter(rows.values())) if band != "all"]
    return [
        "| gap at positions | " + " | ".join(bands) + " |",
        "|" + "---|" * (len(bands) + 1),
        *(f"| {name} | " + " | ".join(row[band] for band in bands) + " |"
          for name, row in rows.items()),
    ]  # fmt: skip


def probe_table(measures: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return the lines of the probe table, at each run's last step."""
    lines = []
    for kind in ("copy", "look-up"):
        rows: dict[str, dict[str, str]] = {}
        for name, measured in measures.items():
            of_kind = [row for row in measured if row["measure"] == kind]
            last = max((int(row["step"]) for row in of_kind), default=0)
            for row in of_kind:
                if int(row["step"]) == last:
                    text = f"{float(row['value']):.3f} ± {float(row['error']):.3f}"
                    rows.setdefault(name, {})[row["part"]] = text
        if rows:
            parts = list(next(iter(rows.values())))
            lines += [f"| {kind}, tokens back | " + " | ".join(parts) + " |"]
            lines += ["|" + "---|" * (len(parts) + 1)]
            lines += [
                f"| {n} | " + " | ".join(row[p] for p in parts) + " |" for n, row in rows.items()
            ]
    return lines


def layer_rows(folder: Path, names: Iterable[str]) -> list[tuple]:
    """Read every tenth step for ``layers.csv`` from the runs' TensorBoard files."""
    from megatron_dsa.extras.report.events import read_run

    rows = []
    for name in names:
        if not any((folder / name / "events").glob("*tfevents*")):
            continue
        log = read_run(name, folder / name / "events")
        columns = {column: log.layers(tag) for column, tag in LAYERS.items()}
        for layer in sorted(set().union(*columns.values())):
            series = {c: dict(found.get(layer, ())) for c, found in columns.items()}
            for step in sorted(set().union(*series.values())):
                if step % 10 == 0:
                    rows.append((name, step, layer, *(s.get(step, "") for s in series.values())))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="RUN_DIR of the scripts")
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--tokens-per-step", type=int, required=True)
    arguments = parser.parse_args()
    folder = arguments.run
    logs = {
        name: (folder / name / "train.log").read_text(encoding="utf-8", errors="replace")
        for name in runs_of(folder)
    }
    curves = {name: curve for name, log in logs.items() if (curve := losses(log))}
    if not curves:
        sys.exit(f"error: no run in {folder} has a validation loss yet")
    trained = {name: found for name, log in logs.items() if (found := training_steps(log))}
    masses = {
        name: mass for name, found in trained.items() if (mass := found[max(found)][1]) is not None
    }
    times = {
        name: statistics.median(time for time, _ in found.values())
        for name, found in trained.items()
    }
    write(
        folder / "training.csv", ["run", "step", "milliseconds", "mass"],
        ([name, step, time, "" if mass is None else mass]
         for name, found in trained.items() for step, (time, mass) in sorted(found.items())),
    )  # fmt: skip
    write(
        folder / "validation.csv", ["run", "step", "tokens", "validation_loss"],
        ([name, step, step * arguments.tokens_per_step, loss]
         for name, curve in curves.items() for step, loss in sorted(curve.items())),
    )  # fmt: skip
    of_runs = {}
    for kind in ("measures", "documents"):
        of_runs[kind] = {name: read(folder / name / f"{kind}.csv") for name in curves}
        rows = [(name, *row.values()) for name, found in of_runs[kind].items() for row in found]
        columns = next((list(row) for found in of_runs[kind].values() for row in found), None)
        if columns:
            write(folder / f"{kind}.csv", ["run", *columns], rows)
    documents = {name: document_sums(rows) for name, rows in of_runs["documents"].items()}
    try:
        if rows := layer_rows(folder, curves):
            write(folder / "layers.csv", ["run", "step", "layer", *LAYERS], rows)
    except ImportError as missing:
        print(f"no layers.csv: {missing}")
    for lines in (position_table(documents), probe_table(of_runs["measures"])):
        print("\n".join([*lines, ""]) if lines else "", end="\n" if lines else "")
    print("\n".join(table(curves, documents, masses, times, arguments.warmup_steps)))


if __name__ == "__main__":
    main()
