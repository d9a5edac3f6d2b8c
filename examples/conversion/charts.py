"""Four charts of the runs of ``all.sh``, from the CSVs that ``table.py`` writes.

``python charts.py RUN_DIR FOLDER`` writes ``losses.png``, ``positions.png``, ``selection.png`` and
``probes.png``; a chart without data is left out. Bars of error are standard errors: over documents
for losses, over sequences for probes. CSVs of several seeds, which ``seeds.py`` writes, give a line
per seed in the first chart and means in the others, with the standard error over seeds.
"""

import argparse
import math
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")

from held_out import gaps
from matplotlib import pyplot
from table import REFERENCE, Sums, document_sums, read

COLOURS = {
    "dense": "#000000", "dense_on": "#4d4d4d", "warmup": "#cc79a7", "sparse": "#0072b2",
    "sparse_without_warmup": "#e69f00", "scratch": "#009e73",
    "v4": "#7f3c8d",
}  # fmt: skip
OTHERS = ("#56b4e9", "#d55e00", "#f0e442", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#7f7f7f")


def colours(runs: list[str]) -> dict[str, str]:
    """Return a colour per run."""
    others = [run for run in runs if run not in COLOURS]
    return COLOURS | {run: OTHERS[i % len(OTHERS)] for i, run in enumerate(others)}


def in_runs(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Return rows by run."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return found


def by_seed(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Return rows by seed, in their order; those of a CSV without seeds have the empty one."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row.get("seed", ""), []).append(row)
    return found


def over_seeds(values: list[float], error: float) -> tuple[float, float]:
    """Return the mean and its standard error; ``error`` is that of a single value."""
    if len(values) < 2:
        return values[0], error
    return fmean(values), stdev(values) / math.sqrt(len(values))


def means(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of ``measures.csv`` with one, of all seeds, in place of one per seed."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["step"], row["measure"], row["part"]), []).append(row)
    found = []
    for first, *others in groups.values():
        values = [float(row["value"]) for row in (first, *others)]
        value, error = over_seeds(values, float(first["error"] or "nan"))
        found.append(first | {"value": str(value), "error": str(error)})
    return found


def save(figure, target: Path) -> Path:
    """Write a figure; return the file."""
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def draw_losses(
    validation: list[dict[str, str]], sums: dict[str, dict[str, dict[int, Sums]]], target: Path
):
    """Draw losses against tokens, and the gaps to the dense model that went on."""
    colour = colours(list(in_runs(validation)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    labelled = set()
    for seed, of_seed in by_seed(validation).items():
        for run, rows in in_runs(of_seed).items():
            label = None if run in labelled else run
            labelled.add(run)
            places = [float(row["tokens"]) / 1e6 for row in rows]
            values = [float(row["validation_loss"]) for row in rows]
            left.plot(places, values, marker="o", ms=3, color=colour[run], label=label)
            per_step = {int(row["step"]): float(row["tokens"]) / 1e6 for row in rows}
            documents = sums.get(seed, {})
            theirs, mine = documents.get(REFERENCE, {}), documents.get(run, {})
            steps = [step for step in sorted(mine) if step in theirs and step in per_step]
            if run != REFERENCE and steps:
                found = [gaps(mine[step], theirs[step])["all"] for step in steps]
                places = [per_step[step] for step in steps]
                values, errors = zip(*found, strict=True)
                right.errorbar(places, values, errors, capsize=3, color=colour[run], label=label)
    right.axhline(0, color=COLOURS[REFERENCE], lw=1)
    left.set(xlabel="million tokens", ylabel="held-out loss (nats per token)")
    right.set(xlabel="million tokens", ylabel=f"gap to {REFERENCE} at equal tokens (nats)")
    left.legend(fontsize=8)
    return save(figure, target)


def last_gaps(
    sums: dict[str, dict[str, dict[int, Sums]]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return gaps and errors of the last step of every run, by band of positions."""
    of_seeds: dict[str, list[dict[str, tuple[float, float]]]] = {}
    for documents in sums.values():
        theirs = documents.get(REFERENCE, {})
        for run, mine in documents.items():
            if run != REFERENCE and mine and max(mine) in theirs:
                of_seeds.setdefault(run, []).append(gaps(mine[max(mine)], theirs[max(mine)]))
    return {
        run: {
            band: over_seeds([each[band][0] for each in found], found[0][band][1])
            for band in found[0]
        }
        for run, found in of_seeds.items()
    }


def draw_positions(sums: dict[str, dict[str, dict[int, Sums]]], target: Path):
    """Draw the gaps by position in the sequence, of the last step of every run."""
    found = last_gaps(sums)
    if not found:
        return None
    colour = colours(list(found))
    bands = [band for band in next(iter(found.values())) if band != "all"]
    figure, axis = pyplot.subplots(figsize=(7, 4.4))
    width = 0.8 / len(found)
    for number, (run, by_band) in enumerate(found.items()):
        places = [place + (number - (len(found) - 1) / 2) * width for place in range(len(bands))]
        axis.bar(places, [by_band[band][0] for band in bands], width, color=colour[run], label=run,
                 yerr=[by_band[band][1] for band in bands], capsize=3)  # fmt: skip
    axis.axhline(0, color=COLOURS[REFERENCE], lw=1)
    axis.set_xticks(range(len(bands)), bands)
    axis.set(xlabel="position in the sequence", ylabel=f"gap to {REFERENCE} (nats per token)")
    axis.legend(fontsize=8)
    return save(figure, target)


def draw_selection(measures: list[dict[str, str]], layers: list[dict[str, str]], target: Path):
    """Draw captured mass (dashed: of the best K keys), recall and the indexer's loss by layer."""
    of_runs = {
        run: rows
        for run, rows in in_runs(measures).items()
        if any(row["measure"] == "recall" for row in rows)
    }
    if not of_runs:
        return None
    colour = colours(list(in_runs(measures)))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8))
    for run, rows in of_runs.items():
        last = max(int(row["step"]) for row in rows if row["measure"] == "recall")
        for axis, names in ((axes[0, 0], ("mass", "best mass")), (axes[0, 1], ("recall",))):
            for name in names:
                found = {
                    int(row["part"].split()[1]): (float(row["value"]), float(row["error"]))
                    for row in rows
                    if row["measure"] == name and int(row["step"]) == last
                }
                numbers = sorted(found)
                best = name == "best mass"
                axis.errorbar(numbers, [found[n][0] for n in numbers],
                              [found[n][1] for n in numbers], capsize=2, color=colour[run],
                              ls="--" if best else "-", label=None if best else run)  # fmt: skip
    for run, rows in in_runs(layers).items():
        for axis, column in ((axes[1, 0], "mass"), (axes[1, 1], "indexer_loss")):
            for seed, layer in sorted({(row.get("seed", ""), int(row["layer"])) for row in rows}):
                series = [
                    (int(row["step"]), float(row[column]))
                    for row in rows
                    if (row.get("seed", ""), int(row["layer"])) == (seed, layer) and row[column]
                ]
                if series:
                    axis.plot(*zip(*series, strict=True), color=colour[run], lw=0.7, alpha=0.6)
    axes[0, 0].set(xlabel="layer", ylabel="attention mass captured (dashed: best K keys)")
    axes[0, 1].set(xlabel="layer", ylabel="recall of the best K keys")
    axes[1, 0].set(xlabel="step", ylabel="mass captured, in training; a line per layer")
    axes[1, 1].set(xlabel="step", ylabel="indexer loss (nats); a line per layer", yscale="log")
    axes[0, 1].legend(fontsize=8)
    return save(figure, target)


def draw_probes(measures: list[dict[str, str]], target: Path):
    """Draw the accuracy of copies and look-ups by distance, of the last step of every run."""
    runs = {
        run: rows
        for run, rows in in_runs(measures).items()
        if any(row["measure"] == "copy" for row in rows)
    }
    if not runs:
        return None
    colour = colours(list(runs))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for axis, kind in zip(axes, ("copy", "look-up"), strict=True):
        for run, rows in runs.items():
            last = max(int(row["step"]) for row in rows if row["measure"] == kind)
            found = {
                row["part"]: (float(row["value"]), float(row["error"]))
                for row in rows
                if row["measure"] == kind and int(row["step"]) == last
            }
            axis.errorbar(list(found), [value for value, _ in found.values()],
                          [error for _, error in found.values()], capsize=3, marker="o", ms=3,
                          color=colour[run], label=run)  # fmt: skip
        axis.set(xlabel="tokens back", title=kind)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=8)
    return save(figure, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the CSVs")
    parser.add_argument("folder", type=Path, help="folder of the charts")
    arguments = parser.parse_args()
    validation, measures, documents, layers = (
        read(arguments.run / f"{name}.csv")
        for name in ("validation", "measures", "documents", "layers")
    )
    sums = {
        seed: {run: document_sums(of_run) for run, of_run in in_runs(rows).items()}
        for seed, rows in by_seed(documents).items()
    }
    measures = means(measures)
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        draw_losses(validation, sums, folder / "losses.png") if validation else None,
        draw_positions(sums, folder / "positions.png"),
        draw_selection(measures, layers, folder / "selection.png"),
        draw_probes(measures, folder / "probes.png"),
    ]
    for file in filter(None, drawn):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
