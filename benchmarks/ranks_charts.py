"""Charts of the benchmark over several GPUs, drawn from its CSV and written next to it.

``<csv>_layers.png``: parallel efficiency and exposed communication of training steps.
``<csv>_simulated.png``: steps of one of several tensor-parallel ranks, by heads and by sequence.
Where a file holds several runs of one measurement, the last one counts. Files from before a column
was added are read as well.
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.charts import _machine, _save, _thousands, pyplot

#: Columns that older files lack, as they were measured.
ADDED = {"layers": "1", "collectives": "overlapped"}


def draw_ranks(path: Path) -> list[Path]:
    """Draw what the rows of a CSV allow; return the files that were written."""
    last: dict[tuple, dict] = {}
    names = (
        "gpu", "part", "tp", "cp", "preset", "ratio", "rows", "cp_layout", "tp_mode", "layers",
        "collectives",
    )  # fmt: skip
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            row = ADDED | row
            if row["status"] == "ok" and row["operation"] != "forward":
                last[tuple(row[name] for name in names)] = row
    rows = list(last.values())
    layers = [row for row in rows if row["part"] == "layers" and row["efficiency"]]
    layers = [row for row in layers if int(row["tp"]) * int(row["cp"]) > 1]
    cores = [row for row in rows if row["part"] == "simulated"]
    sent = {_core(row): float(row["median_ms"]) for row in rows if row["part"] == "exchange"}
    written = []
    if layers:
        written.append(draw_layers(layers, path.with_name(f"{path.stem}_layers.png")))
    if cores:
        written.append(draw_cores(cores, sent, path.with_name(f"{path.stem}_simulated.png")))
    return written


def draw_layers(rows: list[dict], target: Path) -> Path:
    """Draw two bars per case: efficiency, and the share of the step in which only NCCL runs."""
    figure, axis = pyplot.subplots(figsize=(10, 2 + 0.5 * len(rows)))
    for number, (column, label) in enumerate(
        (("efficiency", "parallel efficiency"), ("exposed_share", "exposed communication"))
    ):
        values = [100 * float(row[column] or 0) for row in rows]
        drawn = axis.barh([place + 0.4 * number for place in range(len(rows))], values, 0.4,
                          label=f"{label}, %")  # fmt: skip
        # What was not traced has no bar, and no number either.
        axis.bar_label(drawn, [f"{v:.0f}" if row[column] else "" for v, row in
                               zip(values, rows, strict=True)], fontsize=8)  # fmt: skip
    axis.axvline(100, color="k", linewidth=1)
    axis.set_yticks([place + 0.2 for place in range(len(rows))], [_label(row) for row in rows])
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    figure.legend(loc="lower center", ncols=2, fontsize=8, frameon=False)
    _save(figure, f"Training steps of attention layers\n{_machine(rows[-1])}", target,
          bottom=0.3 / figure.get_figheight())  # fmt: skip
    return target


def draw_cores(rows: list[dict], sent: dict[tuple, float], target: Path) -> Path:
    """Draw the time of a simulated rank's core, with what it sends behind it."""
    figure, axis = pyplot.subplots(figsize=(10, 2 + 0.4 * len(rows)))
    times = [float(row["median_ms"]) for row in rows]
    exchanged = [sent.get(_core(row), 0.0) for row in rows]
    axis.barh(range(len(rows)), times, label="core, forward and backward")
    drawn = axis.barh(range(len(rows)), exchanged, left=times, label="exchanged apart from it")
    labels = [f"{a + b:.3g}" for a, b in zip(times, exchanged, strict=True)]
    axis.bar_label(drawn, labels, fontsize=8)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="ms")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8)
    _save(figure, f"One of several tensor-parallel ranks\n{_machine(rows[-1])}", target)
    return target


def _core(row: dict) -> tuple:
    return tuple(row[name] for name in ("gpu", "tp", "preset", "rows", "tp_mode"))


def _label(row: dict) -> str:
    ratio = f" ratio {row['ratio']}" if row["ratio"] else ""
    ranks = " ".join(f"{name}{row[name]}" for name in ("tp", "cp") if row[name] != "1")
    plain = "plain" if row["collectives"] == "plain" else None
    how = " ".join(filter(None, (ranks, row["cp_layout"], row["tp_mode"], plain)))
    chain = f" x {row['layers']}" if row["layers"] not in ("", "1") else ""
    return f"{row['preset']}{ratio}{chain}, {_thousands(int(row['rows']))}, {how or 'one rank'}"
