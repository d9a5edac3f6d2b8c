"""Table and chart of the runs of ``benchmarks.convergence``.

    python -m benchmarks.convergence_table runs/convergence

writes ``benchmarks/convergence.csv``, a row per run and evaluation, and ``convergence.png`` beside
it, and prints what the runs ended with. The gap to dense attention is taken seed by seed, where
both saw the same text, and its sharding is that between seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from pathlib import Path

from benchmarks.charts import pyplot
from megatron_dsa.metrics.tags import FIGURES
from megatron_dsa.tools.report.events import RunLog, read_run

CSV = Path(__file__).with_name("convergence.csv")
COLUMNS = (
    "way", "seed", "step", "tokens", "training_seconds", "ms_per_step", "lm_loss",
    "validation_loss", "validation_bits_per_byte", "indexer_loss", "mass_captured", "parameters",
    "at_once", "train_tokens", "held_out_tokens", "python", "gpu", "torch", "cuda", "package",
    "tilelang", "flash_mla", "cudnn_frontend",
)  # fmt: skip
LABELS = {
    "dense": "dense MLA",
    "sparse": "V3.2, sparse from the start",
    "staged": "V3.2, dense for a third, then sparse",
    "hybrid": "V4 hybrid, from the start",
}
COLORS = {"dense": "#4d4d4d", "sparse": "#0072b2", "staged": "#e69f00", "hybrid": "#009e73"}


def training_seconds(log: RunLog) -> dict[int, float]:
    """Return the time of all steps up to a step, without evaluation and start-up.

    Where kernels were compiled (a mean of three times the median), steps count like the median.
    """
    series = log.scalars["iteration-time"]
    usual = statistics.median(value for _, value in series)
    total, before, seconds = 0.0, 0, {}
    for step, value in series:
        total += (step - before) * (value if value < 3 * usual else usual)
        before, seconds[step] = step, total
    return seconds


def rows_of(folder: Path, environment: dict) -> list[dict]:
    """Return the rows of one run."""
    told = json.loads((folder / "run.json").read_text())
    log = read_run(folder.name, folder / "events")
    seconds = training_seconds(log)
    usual = statistics.median(value for _, value in log.scalars["iteration-time"][1:])
    training = dict(log.scalars["lm loss"])
    figures = {
        column: dict(log.scalars.get(FIGURES[name], ()))
        for column, name in (
            ("indexer_loss", "indexer loss"), ("mass_captured", "dsa attention mass captured")
        )
    }  # fmt: skip
    rows = []
    for step, loss in log.scalars["lm loss validation"]:
        row = {"step": step, "tokens": step * told["batch_tokens"]}
        row["training_seconds"] = round(seconds[step], 3)
        row["ms_per_step"] = round(1e3 * usual, 1)
        row["lm_loss"] = round(training[step], 5)
        row["validation_loss"] = round(loss, 5)
        row["validation_bits_per_byte"] = round(loss / math.log(2), 5)
        row |= {name: f"{values[step]:.5g}" for name, values in figures.items() if step in values}
        row |= told | environment
        rows.append({name: row.get(name) for name in COLUMNS})
    return rows


def collect(folder: Path) -> list[dict]:
    """Return the rows of all runs in a folder that came to their end."""
    environment = json.loads((folder / "environment.json").read_text())
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    rows = [row for run in runs for row in rows_of(run, environment)]
    order = {way: number for number, way in enumerate(LABELS)}
    return sorted(rows, key=lambda row: (order[row["way"]], row["seed"], row["step"]))


def curves(rows: list[dict], way: str, column: str) -> dict[int, dict[int, float]]:
    """Return a column of a way by seed and step."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["way"] == way:
            found.setdefault(int(row["seed"]), {})[int(row["step"])] = float(row[column])
    return found


def gaps(rows: list[dict], way: str) -> dict[int, list[float]]:
    """Return by step, for every seed, how much more bits per byte a way needs than dense."""
    dense = curves(rows, "dense", "validation_bits_per_byte")
    mine = curves(rows, way, "validation_bits_per_byte")
    found: dict[int, list[float]] = {}
    for seed in sorted(dense.keys() & mine.keys()):
        for step in sorted(dense[seed].keys() & mine[seed].keys()):
            found.setdefault(step, []).append(mine[seed][step] - dense[seed][step])
    return found


def noise(rows: list[dict]) -> tuple[dict[int, float], dict[int, float]]:
    """Return by step how far the seeds of dense lie below and above their mean."""
    by_step: dict[int, list[float]] = {}
    for curve in curves(rows, "dense", "validation_bits_per_byte").values():
        for step, loss in curve.items():
            by_step.setdefault(step, []).append(loss)
    means = {step: statistics.mean(values) for step, values in by_step.items()}
    low, high = (
        {step: edge(values) - means[step] for step, values in by_step.items()}
        for edge in (min, max)
    )
    return low, high


def ways_in(rows: list[dict]) -> list[str]:
    """Return the ways that the rows hold, in the order of the legend."""
    return [way for way in LABELS if any(row["way"] == way for row in rows)]


def draw(rows: list[dict], target: Path) -> None:
    """Draw validation loss against steps and time, and the gap to dense attention."""
    figure, (by_step, by_time, gap) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    for way in ways_in(rows):
        losses = curves(rows, way, "validation_bits_per_byte")
        for number, (seed, losses_of_seed) in enumerate(losses.items()):
            style = {"color": COLORS[way], "label": None if number else LABELS[way], "lw": 1.4}
            by_step.plot(list(losses_of_seed), list(losses_of_seed.values()), **style)
            alone = [
                row for row in rows
                if (row["way"], int(row["seed"]), int(row["at_once"])) == (way, seed, 1)
            ]  # fmt: skip
            by_time.plot(
                [float(row["training_seconds"]) for row in alone],
                [float(row["validation_bits_per_byte"]) for row in alone],
                **style,
            )
        apart = gaps(rows, way)
        if way == "dense" or not apart:
            continue
        means = [statistics.mean(values) for values in apart.values()]
        gap.plot(list(apart), means, color=COLORS[way], marker="o", ms=3.5)
        low, high = ([edge(values) for values in apart.values()] for edge in (min, max))
        gap.fill_between(list(apart), low, high, color=COLORS[way], alpha=0.2, lw=0)
    low, high = noise(rows)
    gap.fill_between(
        list(low), list(low.values()), list(high.values()), color="0.88", lw=0, zorder=0
    )
    gap.axhline(0, color=COLORS["dense"], lw=1)
    seeds = sorted({row["seed"] for row in rows})
    by_step.set(xlabel="step", ylabel="validation loss (bits per byte)")
    by_time.set(xlabel="training time (s)", ylabel="validation loss (bits per byte)")
    gap.set(xlabel="step", ylabel="gap to dense MLA (bits per byte)")
    gap.set_title(
        f"mean and range of {len(seeds)} seeds; grey: dense alone, around its mean", fontsize=9
    )
    by_step.set_title("a line per seed", fontsize=9)
    by_time.set_title("training steps alone, one run on the GPU at a time", fontsize=9)
    by_step.legend(fontsize=8, frameon=False)
    for axis in (by_step, by_time, gap):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    row = rows[0]
    figure.suptitle(
        f"Sparse and dense attention on the same text: {row['gpu']}, torch {row['torch']}, "
        f"megatron_dsa {row['package']}",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def summary(rows: list[dict]) -> str:
    """Return a table of what every way ended with, mean and standard deviation over seeds."""
    last = max(int(row["step"]) for row in rows)
    lines = [
        "| attention | parameters | ms per step | validation, bits per byte | more than dense |",
        "|---|---|---|---|---|",
    ]
    for way in ways_in(rows):
        mine = [row for row in rows if row["way"] == way and int(row["step"]) == last]
        alone = sorted({float(row["ms_per_step"]) for row in mine if int(row["at_once"]) == 1})
        speed = f"{statistics.median(alone):.1f}" if alone else ""
        losses = [float(row["validation_bits_per_byte"]) for row in mine]
        difference = "" if way == "dense" else sharding(gaps(rows, way).get(last, []), "+")
        size = f"{int(mine[0]['parameters']) / 1e6:.1f} M"
        lines.append(f"| {LABELS[way]} | {size} | {speed} | {sharding(losses)} | {difference} |")
    return "\n".join(lines)


def sharding(values: list[float], sign: str = "") -> str:
    """Return mean and sample standard deviation."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def main() -> None:
    """Parse the command line; write table and chart."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="--output of benchmarks.convergence")
    parser.add_argument("--csv", type=Path, default=CSV)
    arguments = parser.parse_args()
    rows = [row for folder in arguments.folders for row in collect(folder)]
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.csv.with_suffix(".png"))
    print(summary(rows))


if __name__ == "__main__":
    main()
