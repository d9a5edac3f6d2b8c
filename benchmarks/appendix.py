"""All figures of the CSVs as pages, an appendix of ``docs/performance.md`` that is not in git.

``python -m benchmarks pages`` writes it, and the site has it. Standard library only, as in
:mod:`benchmarks.rows`.
"""

import statistics
from pathlib import Path

from benchmarks.rows import METRICS, USUAL_RELEASE, latest, megatron_release, read_csv

FOLDER = Path(__file__).parent
#: Losses of training steps are shown as so many means.
MEANS = 4


def families(folder: Path = FOLDER) -> list[str]:
    """Return the families that have a CSV."""
    return sorted(path.stem for path in folder.glob("*.csv"))


def page(family: str, folder: Path = FOLDER) -> str:
    """Return the page of a family: a table per GPU and part, from the last run of everything."""
    rows = latest(read_csv(folder / f"{family}.csv"))
    lines = [
        f"# Measurements: {family}",
        "",
        f"Generated from `benchmarks/{family}.csv`: the last run of every measurement. "
        "Times are medians in ms, with the 10th and 90th percentile where they were kept; other "
        "columns are metrics of `benchmarks/rows.py`. Cells without a figure name the reason.",
        "",
    ]
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        mine = [row for row in rows if row["gpu"] == gpu]
        lines += [f"## {gpu}", ""]
        for title, chosen in _sections(mine):
            lines += [f"### {title}", "", *_table(chosen), ""]
    return "\n".join(lines)


def _sections(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    """Return a title and rows per operation or whole; parts of it stand behind it."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        top, _, inner = row["part"].partition("/")
        title = "Training steps, means" if top.isdigit() else top
        title = f"Kernels of {top}" if inner else title
        found.setdefault(title, []).append(row)
    return list(found.items())


def _table(rows: list[dict]) -> list[str]:
    """Return a table: a line per case, way and part, a column per field that varies and metric."""
    fields = list(dict.fromkeys(name for row in rows for name in row["case"]))
    varied = [
        name for name in fields if len({str(row["case"].get(name)) for row in rows}) > 1
    ] or fields[:1]  # fmt: skip
    inner = any("/" in row["part"] for row in rows)
    steps = any(row["part"].isdigit() for row in rows)
    metrics = [name for name in METRICS if any(row["metric"] == name for row in rows)]
    found: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        part = row["part"].partition("/")[2]
        release = megatron_release(row)
        way = row["way"] if release == USUAL_RELEASE else f"{row['way']}, Megatron {release}"
        key = (*(row["case"].get(name, "") for name in varied), way, part, row["date"][:10])
        found.setdefault(key, {}).setdefault(row["metric"], []).append(row)
    head = [*varied, "way", *(["operation"] if inner else []), "date", *metrics]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (*case, way, part, date), by_metric in sorted(found.items(), key=lambda x: _order(x[0])):
        cells = [str(x) for x in case] + [way, *([part] if inner else []), date]
        write = _means if steps else _cell
        cells += [write(by_metric.get(name, [])) for name in metrics]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def _order(key: tuple) -> list[tuple[bool, float, str]]:
    """Return what lines are sorted by: numbers by value, before names."""
    return [
        (False, x, "") if isinstance(x, int | float) else (True, 0.0, str(x)) for x in key
    ]  # fmt: skip


def _cell(rows: list[dict]) -> str:
    """Return the figures with their percentiles, or why there is none."""
    return "; ".join(dict.fromkeys(map(_text, rows)))


def _text(row: dict) -> str:
    if row["value"] is None:
        return " ".join(f"{row['status']}: {row['reason']}".split())[:120]
    text = f"{row['value']:.5g}"
    if row["p10"] is not None and row["p90"] is not None:
        text += f" ({row['p10']:.4g} to {row['p90']:.4g})"
    return text


def _means(rows: list[dict]) -> str:
    """Return the means of equal parts of a run's steps, in order."""
    values = [row["value"] for row in sorted(rows, key=lambda row: int(row["part"]))]
    values = [value for value in values if value is not None]
    if len(values) <= MEANS:
        return ", ".join(f"{value:.5g}" for value in values)
    size = -(-len(values) // MEANS)
    parts = [values[k : k + size] for k in range(0, len(values), size)]
    return ", ".join(f"{statistics.fmean(part):.4g}" for part in parts)


def write(target: Path, folder: Path = FOLDER) -> list[Path]:
    """Write the page of every family into a folder; return the files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for family in families(folder):
        path = target / f"{family}.md"
        path.write_text(page(family, folder), encoding="utf-8")
        written.append(path)
    return written
