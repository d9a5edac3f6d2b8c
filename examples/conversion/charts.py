"""Four charts of the runs of ``all.sh``, from the CSVs that ``table.py`` writes.

``python charts.py RUN_DIR FOLDER`` writes ``losses.png``, ``positions.png``, ``selection.png`` and
``probes.png`` where data exist. Error bars are standard errors over documents (losses) or sequences
(probes). With several seeds (``seeds.py``) the first chart has a line per seed; the others show
means, with the error over seeds if it is larger. Variants share their run's colour.
"""

import argparse
import math
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")

from held_out import gaps
from matplotlib import pyplot
from PIL import Image
from seeds import mean
from table import REFERENCE, WARMED, Sums, document_sums, read

from megatron_dsa.training.files.whole import whole_file

COLOURS = {
    "dense": "#000000", "dense_on": "#4d4d4d", "warmup": "#cc79a7", "sparse": "#0072b2",
    "sparse_without_warmup": "#e69f00", "scratch": "#009e73",
    "v4": "#7f3c8d",
}  # fmt: skip
OTHERS = ("#56b4e9", "#d55e00", "#bcbd22", "#8c564b", "#17becf", "#f0e442", "#e377c2", "#7f7f7f")
#: Line style of a variant.
STYLES = {"again": ":", "absorbed": "--", "masked": "-.", "fp8": (0, (1, 1)),
          "fp8_scores": (0, (5, 1, 1, 1))}  # fmt: skip


def parts(run: str) -> tuple[str, str]:
    """Split a run's name into base and variant (``""`` if none)."""
    if run == "dense_on_again":
        return "dense_on", "again"
    found = WARMED.fullmatch(run)
    if found and found[2]:
        return run.removesuffix(f"_{found[2]}"), found[2]
    return run, ""


def styles(runs: list[str]) -> dict[str, dict]:
    names = dict.fromkeys(parts(run)[0] for run in runs)
    others = [name for name in names if name not in COLOURS]
    colour = COLOURS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    return {
        run: {"color": colour[name], "ls": STYLES.get(variant, "-")}
        for run in runs
        for name, variant in (parts(run),)
    }


def in_runs(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return found


def by_seed(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Group CSV entries by seed, in their order (``""`` without seeds)."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row.get("seed", ""), []).append(row)
    return found


def over_seeds(values: list[float], error: float) -> tuple[float, float]:
    """Return the mean, and the larger of ``error`` and the error over seeds."""
    if len(values) < 2:
        return values[0], error
    spread = stdev(values) / math.sqrt(len(values))
    return fmean(values), spread if math.isnan(error) else max(spread, error)


def means(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Average the entries of ``measures.csv`` over seeds.

    Seeds share their sequences, so a mean over seeds keeps the error over sequences.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["step"], row["measure"], row["part"]), []).append(row)
    found = []
    for group in groups.values():
        values = [float(row["value"]) for row in group]
        value, error = over_seeds(values, fmean(float(row["error"] or "nan") for row in group))
        found.append(group[0] | {"value": str(value), "error": str(error)})
    return found


def labels(last: dict[str, int]) -> dict[str, str]:
    """Label runs, with the last step of runs that end early."""
    end = max(last.values(), default=0)
    return {run: run if step == end else f"{run} (step {step})" for run, step in last.items()}


def save(figure, target: Path) -> Path:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with whole_file(target) as file:
        figure.savefig(file, dpi=120)
        image = Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE)
        image.save(file, optimize=True)  # a third of the size
    pyplot.close(figure)
    return target


def draw_losses(
    validation: list[dict[str, str]], sums: dict[str, dict[str, dict[int, Sums]]], target: Path
):
    """Draw losses against tokens, and gaps to the continued dense model."""
    style = styles(list(in_runs(validation)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4))
    labelled = set()
    for seed, of_seed in by_seed(validation).items():
        for run, rows in in_runs(of_seed).items():
            label = None if run in labelled else run
            labelled.add(run)
            places = [float(row["tokens"]) / 1e6 for row in rows]
            values = [float(row["validation_loss"]) for row in rows]
            left.plot(places, values, marker="o", ms=3, label=label, **style[run])
            per_step = {int(row["step"]): float(row["tokens"]) / 1e6 for row in rows}
            documents = sums.get(seed, {})
            theirs, mine = documents.get(REFERENCE, {}), documents.get(run, {})
            steps = [step for step in sorted(mine) if step in theirs and step in per_step]
            if run != REFERENCE and steps:
                found = [gaps(mine[step], theirs[step])["all"] for step in steps]
                places = [per_step[step] for step in steps]
                values, errors = zip(*found, strict=True)
                right.errorbar(places, values, errors, capsize=3, marker="o", ms=3, **style[run])
    right.axhline(0, color=COLOURS[REFERENCE], lw=1)
    left.set(xlabel="million tokens", ylabel="held-out loss (nats per token)")
    right.set(xlabel="million tokens", ylabel=f"gap to {REFERENCE} (nats per token)")
    left.legend(fontsize=7)
    return save(figure, target)


def last_gaps(
    sums: dict[str, dict[str, dict[int, Sums]]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each run's gaps and errors at its last step, by position band."""
    of_seeds: dict[str, list[tuple[Sums, Sums]]] = {}
    for documents in sums.values():
        theirs = documents.get(REFERENCE, {})
        for run, mine in documents.items():
            if run != REFERENCE and mine and max(mine) in theirs:
                of_seeds.setdefault(run, []).append((mine[max(mine)], theirs[max(mine)]))
    found = {}
    for run, pairs in of_seeds.items():
        each = [gaps(*pair) for pair in pairs]
        both = gaps(*(mean(list(several)) for several in zip(*pairs, strict=True)))
        found[run] = {
            band: over_seeds([gap[band][0] for gap in each], error)
            for band, (_, error) in both.items()
        }
    return found


def draw_positions(sums: dict[str, dict[str, dict[int, Sums]]], target: Path):
    """Draw each run's gaps at its last step, by position in the sequence."""
    found = last_gaps(sums)
    if not found:
        return None
    style = styles(list(found))
    label = labels(
        {run: max(mine) for documents in sums.values() for run, mine in documents.items()}
    )
    bands = [band for band in next(iter(found.values())) if band != "all"]
    figure, axis = pyplot.subplots(figsize=(9, 4.4))
    width = 0.8 / len(found)
    for number, (run, by_band) in enumerate(found.items()):
        places = [place + (number - (len(found) - 1) / 2) * width for place in range(len(bands))]
        axis.errorbar(places, [by_band[band][0] for band in bands],
                      [by_band[band][1] for band in bands], capsize=3, marker="o", ms=4,
                      lw=0.8, label=label[run], **style[run])  # fmt: skip
    axis.axhline(0, color=COLOURS[REFERENCE], lw=1)
    axis.set_xticks(range(len(bands)), bands)
    axis.set(xlabel="position in the sequence", ylabel=f"gap to {REFERENCE} (nats per token)")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, target)


def of_layers(rows: list[dict[str, str]], measure: str) -> dict[int, tuple[float, float]]:
    """Return value and error by layer at the last step with this measure."""
    of_measure = [row for row in rows if row["measure"] == measure]
    last = max((int(row["step"]) for row in of_measure), default=0)
    return {
        int(row["part"].split()[1]): (float(row["value"]), float(row["error"] or "nan"))
        for row in sorted(of_measure, key=lambda row: int(row["part"].split()[1]))
        if int(row["step"]) == last
    }


def draw_selection(
    measures: list[dict[str, str]], training: list[dict[str, str]],
    layers: list[dict[str, str]], target: Path,
):  # fmt: skip
    """Draw captured mass, recall and indexer loss by layer; dashed lines are for the best K keys.

    Also draw captured mass over steps, by layer if ``layers.csv`` exists, else its mean.
    """
    of_runs = {
        run: rows
        for run, rows in in_runs(measures).items()
        if any(row["measure"] == "recall" for row in rows)
    }
    if not of_runs:
        return None
    style = styles(list(in_runs(measures)))
    label = labels({run: max(int(row["step"]) for row in rows) for run, rows in of_runs.items()})
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.4))
    for run, rows in of_runs.items():
        for axis, name in (
            (axes[0, 0], "mass"), (axes[0, 0], "best mass"), (axes[0, 1], "recall"),
            (axes[1, 1], "indexer KL"),
        ):  # fmt: skip
            found = of_layers(rows, name)
            values, errors = zip(*found.values(), strict=True) if found else ((), ())
            look = {"ls": "--", "lw": 0.8} if name == "best mass" else {"lw": 1.2}
            axis.errorbar(list(found), values, errors, capsize=2,
                          label=None if name == "best mass" else label[run],
                          **style[run] | look)  # fmt: skip
    for run, rows in in_runs(layers or training).items():
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row in rows:
            if row["mass"]:
                line = lines.setdefault((row.get("seed", ""), row.get("layer", "")), [])
                line.append((int(row["step"]), float(row["mass"])))
        for line in lines.values():
            axes[1, 0].plot(*zip(*line, strict=True), lw=0.8, alpha=0.8, **style[run])
    each = "a line per layer" if layers else "mean over layers"
    axes[0, 0].set(xlabel="layer", ylabel="attention mass (dashed: best K keys)")
    axes[0, 1].set(xlabel="layer", ylabel="recall of the best K keys")
    axes[1, 0].set(xlabel="step", ylabel=f"mass in training, {each}")
    axes[1, 1].set(xlabel="layer", ylabel="indexer KL (nats)", ylim=(0, None))
    axes[0, 0].legend(fontsize=7)
    return save(figure, target)


def draw_probes(measures: list[dict[str, str]], target: Path):
    """Draw each run's accuracy in copies and look-ups at its last step, by distance."""
    runs = {
        run: rows
        for run, rows in in_runs(measures).items()
        if any(row["measure"] == "copy" for row in rows)
    }
    if not runs:
        return None
    style = styles(list(runs))
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
                          label=run, **style[run])  # fmt: skip
        axis.set(xlabel="tokens back", title=kind)
    axes[0].set_ylabel("accuracy")
    axes[0].set(ylim=(-0.02, None))
    axes[0].legend(fontsize=7, ncols=2)
    return save(figure, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the CSVs")
    parser.add_argument("folder", type=Path, help="folder of the charts")
    arguments = parser.parse_args()
    validation, measures, documents, training, layers = (
        read(arguments.run / f"{name}.csv")
        for name in ("validation", "measures", "documents", "training", "layers")
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
        draw_selection(measures, training, layers, folder / "selection.png"),
        draw_probes(measures, folder / "probes.png"),
    ]
    for file in filter(None, drawn):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
