"""Tables of ``results.sh`` over several seeds, or several sessions of one.

``python seeds.py OUTPUT RUN_DIR...`` joins the CSVs of every ``RUN_DIR`` in ``OUTPUT``, with a
first column ``seed``, and prints a table. A gap is the mean difference to the same seed's continued
dense model. Variants are also compared with their run; runs with fewer keys or without a warm-up,
with ``sparse``. The first error is over documents, which all seeds share; the second is over seeds.
Two sessions of a run count once, with their mean gap; the CSVs have the first session. ``OUTPUT``
can be a ``RUN_DIR`` of a later call.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from held_out import mean_over_clusters
from table import REFERENCE, WARMED, Sums, compared, document_sums, read, write

FILES = ("validation", "measures", "documents", "training", "layers")
SETTINGS = re.compile(r"seeds? ([\d ]+), (steps \d+ (\d+) \d+, .*)")


@dataclass
class Session:
    """Content of a ``RUN_DIR``: CSVs by file, and losses of documents by run and step."""

    seed: int
    rows: dict[str, list[dict[str, str]]]
    documents: dict[str, dict[int, Sums]] = field(init=False)

    def __post_init__(self):
        by_run: dict[str, list[dict[str, str]]] = {}
        for row in self.rows["documents"]:
            by_run.setdefault(row["run"], []).append(row)
        self.documents = {run: document_sums(rows) for run, rows in by_run.items()}


def sessions(folders: Iterable[Path]) -> tuple[list[Session], str, int]:
    """Read folders of different seeds; return sessions, settings and number of warm-up steps.

    A folder written by :func:`main` gives a session per seed.
    """
    found, others, warmup = [], set(), 0
    for folder in folders:
        file = folder / "settings.txt"
        said = SETTINGS.fullmatch(file.read_text().strip()) if file.is_file() else None
        if said is None:
            sys.exit(f"error: {file} must say seed and steps: is {folder} the RUN_DIR of all.sh?")
        rows = {name: read(folder / f"{name}.csv") for name in FILES}
        if not rows["documents"]:
            sys.exit(f"error: {folder} has no documents.csv: run results.sh first")
        for seed in said[1].split():
            of_seed = {
                name: [row for row in of_file if row.get("seed", seed) == seed]
                for name, of_file in rows.items()
            }
            found.append(Session(int(seed), of_seed))
        others.add(said[2])
        warmup = int(said[3])
    if len(others) > 1:
        sys.exit(f"error: runs of other settings have no common gap: {'; '.join(sorted(others))}")
    return found, others.pop(), warmup


def combined(found: list[Session], name: str) -> Iterator[list]:
    """Yield a CSV's header and its entries of all sessions, each run of a seed once."""
    columns: list[str] = []
    there: set[tuple[int, str]] = set()
    for session in found:
        for row in session.rows[name]:
            if not columns:
                columns = [column for column in row if column != "seed"]
                yield ["seed", *columns]
            if (session.seed, row["run"]) not in there:
                yield [session.seed, *(row[column] for column in columns)]
        there |= {(session.seed, row["run"]) for row in session.rows[name]}


@dataclass(frozen=True)
class Gap:
    """Mean gap over seeds in nats per token, and its errors, NaN for one cluster."""

    seeds: int
    value: float
    over_documents: float
    over_seeds: float
    reference: float


def gap_of(found: list[Session], run: str, step: int, other: str, at: int) -> Gap | None:
    """Return the gap of a run's ``step`` to ``other``'s step ``at``, ``None`` without common seeds.

    Prefer sessions that have both runs.

    Raises:
        ValueError: the runs were measured on different text.
    """
    of_seeds: dict[int, list[dict[int, tuple[float, int]]]] = {}
    references: dict[int, float] = {}
    for session in found:
        mine = session.documents.get(run, {}).get(step)
        here = [session, *(each for each in found if each.seed == session.seed)]
        theirs = next((t for each in here if (t := each.documents.get(other, {}).get(at))), None)
        if mine is None or theirs is None:
            continue
        if {key: n for key, (_, n) in mine.items()} != {key: n for key, (_, n) in theirs.items()}:
            raise ValueError("the losses are of different documents: measure both on the same text")
        apart: dict[int, tuple[float, int]] = {}
        total = tokens = 0.0
        for (document, band), (loss, count) in mine.items():
            before, reference = apart.get(document, (0.0, 0)), theirs[document, band][0]
            apart[document] = (before[0] + loss - reference, before[1] + count)
            total, tokens = total + reference, tokens + count
        of_seeds.setdefault(session.seed, []).append(apart)
        references[session.seed] = total / tokens
    if not of_seeds:
        return None
    means = [mean(each) for each in of_seeds.values()]
    number = len(means)
    values = [mean_over_clusters(*zip(*each.values(), strict=True))[0] for each in means]
    _, over_documents = mean_over_clusters(*zip(*mean(means).values(), strict=True))
    over_seeds = stdev(values) / number**0.5 if number > 1 else float("nan")
    return Gap(number, fmean(values), over_documents, over_seeds, fmean(references.values()))


def mean[Key](several: list[dict[Key, tuple[float, int]]]) -> dict[Key, tuple[float, float]]:
    """Average sums and numbers of tokens.

    Seeds cut documents differently, so a band has different tokens of a document.
    """
    return {
        key: (
            fmean(each.get(key, (0.0, 0))[0] for each in several),
            fmean(each.get(key, (0.0, 0))[1] for each in several),
        )
        for key in dict.fromkeys(key for each in several for key in each)
    }


def comparisons(found: list[Session], warmup: int) -> Iterator[tuple[str, int, str, int]]:
    """Yield each run and last step, and the run and step to compare with."""
    runs = dict.fromkeys(run for session in found for run in session.documents)
    for run in runs:
        if run == "dense":  # ends where the others begin
            continue
        last = max(max(each.documents[run]) for each in found if run in each.documents)
        for step in compared(run, last, warmup):
            yield run, last, REFERENCE, step
        parts = WARMED.fullmatch(run)
        if parts and parts[2]:
            yield run, last, f"sparse_{parts[1]}" if parts[1] else "sparse", last
        elif (parts and parts[1]) or run == "sparse_without_warmup":
            yield run, last, "sparse", last


def table(found: list[Session], warmup: int) -> list[str]:
    lines = ["| run | step | to | seeds | gap | error: documents | seeds |", "|" + "---|" * 7]
    for run, step, other, at in comparisons(found, warmup):
        gap = gap_of(found, run, step, other, at)
        if gap is None:
            lines.append(f"| {run} | {step} | {other}, {at} | 0 | not measured | | |")
            continue
        over_seeds = f"{gap.over_seeds:.4f}" if gap.seeds > 1 else ""
        lines.append(
            f"| {run} | {step} | {other}, {at} | {gap.seeds} | {gap.value:+.4f} "
            f"({gap.value / gap.reference:+.2%}) | {gap.over_documents:.4f} | {over_seeds} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of the CSVs of all")
    parser.add_argument("runs", type=Path, nargs="+", help="RUN_DIR of the scripts, of each seed")
    arguments = parser.parse_args()
    found, settings, warmup = sessions(arguments.runs)
    arguments.output.mkdir(parents=True, exist_ok=True)
    numbers = " ".join(map(str, sorted({session.seed for session in found})))
    (arguments.output / "settings.txt").write_text(f"seeds {numbers}, {settings}\n")
    for name in FILES:
        rows = list(combined(found, name))
        if rows:
            write(arguments.output / f"{name}.csv", rows[0], rows[1:])
    print("\n".join(table(found, warmup)))


if __name__ == "__main__":
    main()
