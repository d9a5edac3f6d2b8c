"""Four charts of the runs of ``all.sh``, from the CSVs that ``table.py`` writes.

``python charts.py RUN_DIR FOLDER`` writes ``losses.png``, ``positions.png``, ``selection.png`` and
``probes.png``; a chart without data is left out. Bars of error are standard errors: over documents
for losses, over sequences for probes.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from held_out import gaps
from matplotlib import pyplot
from table import REFERENCE, Sums, document_sums, read

COLOURS = {
    "dense": "#000000", "dense_on": "#4d4d4d", "warmup": "#cc79a7", "sparse": "#0072b2",
    "sparse_without_warmup": "#e69f00", "scratch": "#009e73",
}  # fmt: skip
OTHERS = ("#56b4e9", "#d55e00", "#f0e442")


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


def save(figure, target: Path) -> Path:
    """Write a figure; return the file."""
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def draw_losses(validation: list[dict[str, str]], sums: dict[str, dict[int, Sums]], target: Path):
    """Draw losses against tokens, and the gaps to the dense model that went on."""
    runs = in_runs(validation)
    colour = colours(list(runs))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    for run, rows in runs.items():
        places = [float(row["tokens"]) / 1e6 for row in rows]
        values = [float(row["validation_loss"]) for row in rows]
        left.plot(places, values, marker="o", ms=3, color=colour[run], label=run)
        per_step = {int(row["step"]): float(row["tokens"]) / 1e6 for row in rows}
        theirs, mine = sums.get(REFERENCE, {}), sums.get(run, {})
        steps = [step for step in sorted(mine) if step in theirs and step in per_step]
        if run != REFERENCE and steps:
            found = [gaps(mine[step], theirs[step])["all"] for step in steps]
            places = [per_step[step] for step in steps]
            values, errors = zip(*found, strict=True)
            right.errorbar(places, values, errors, capsize=3, color=colour[run], label=run)
    right.axhline(0, color=COLOURS[REFERENCE], lw=1)
    left.set(xlabel="million tokens", ylabel="held-out loss (nats per token)")
    right.set(xlabel="million tokens", ylabel=f"gap to {REFERENCE} at equal tokens (nats)")
    left.legend(fontsize=8)
    return save(figure, target)


def draw_positions(sums: dict[str, dict[int, Sums]], target: Path):
    """Draw the gaps by position in the sequence, of the last step of every run."""
    theirs = sums.get(REFERENCE, {})
    found = {
        run: gaps(mine[max(mine)], theirs[max(mine)])
        for run, mine in sums.items()
        if run != REFERENCE and mine and max(mine) in theirs
    }
    if not found:
        return None
    colour = colours(list(sums))
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
            for layer in sorted({int(row["layer"]) for row in rows}):
                series = [
                    (int(row["step"]), float(row[column]))
                    for row in rows
                    if int(row["layer"]) == layer and row[column]
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
    sums = {run: document_sums(rows) for run, rows in in_runs(documents).items()}
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
