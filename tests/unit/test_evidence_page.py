"""``docs/evidence.md``: its figures are those of the CSVs of ``examples/conversion``."""

import csv
import dataclasses
import re

import numpy
import pytest

from tests.cases.conversion import FOLDER, module
from tests.cases.launch_scripts import EXAMPLES

PAGE = EXAMPLES.parent / "docs/evidence.md"


def section(title):
    """Return the text of a section of the page."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


class OnGPU:
    """What the cells of the page's tables of the runs on a GPU have to be, from their CSVs.

    Every method is a column: given the run, the last step or that of the row, and the run and the
    step that it is compared with.
    """

    def __init__(self):
        self.folder = FOLDER / "gpu30"
        seeds = module("seeds")
        self.sessions, _, _ = seeds.sessions([self.folder])
        self._gap_of, read = seeds.gap_of, module("table").read
        self.files = {n: read(self.folder / f"{n}.csv") for n in ("measures", "training", "runs")}
        self.losses = {
            (row["seed"], row["run"], int(row["step"])): float(row["validation_loss"])
            for row in read(self.folder / "validation.csv")
        }

    def values(self, file, run, column, **chosen):
        """Return the values of the rows of a run."""
        chosen = {key.replace("_", " "): value for key, value in chosen.items()} | {"run": run}
        rows = self.files[file]
        return [
            float(row[column])
            for row in rows
            if all(row[key] == value for key, value in chosen.items())
        ]

    def layers(self, run, step, measure):
        """Return means over seeds, by layer."""
        return [
            numpy.mean(found)
            for n in range(1, 13)
            if (found := self.values("measures", run, "value", step=str(step), measure=measure,
                                     part=f"layer {n}"))
        ]  # fmt: skip

    def last(self, run):
        return max(step for _, name, step in self.losses if name == run)

    def gap(self, run, step, other, at, band=None):
        """Return the gap in all positions or in a band."""
        found = self.sessions
        if band:
            found = [
                dataclasses.replace(
                    each, rows={n: [r for r in rows if r.get("band", band) == band]
                                for n, rows in each.rows.items()},
                )
                for each in found
            ]  # fmt: skip
        return self._gap_of(found, run, step, other, at)

    def cell(self, column, run, step, other, at):
        """Return the text of a cell."""
        if column in ("0-1024", "1024-4096", "4096-8192"):
            gap = self.gap(run, step, other, at, column)
            return f"{gap.value:+.4f} ± {gap.over_documents:.4f}"
        if column in ("gap", "difference", "in %", "± documents", "± seeds", "seeds"):
            digits = 5 if column == "difference" else 4
            gap = self.gap(run, step, other, at)
            if gap is None:
                return ""
            return {
                "gap": f"{gap.value:+.4f}",
                "difference": f"{gap.value:+.{digits}f} ± {gap.over_documents:.{digits}f}",
                "in %": f"{gap.value / gap.reference:+.2%}".replace("%", " %"),
                "± documents": f"{gap.over_documents:.4f}",
                "± seeds": f"{gap.over_seeds:.4f}" if gap.seeds > 1 else "",
                "seeds": str(gap.seeds),
            }[column]
        if column == "losses":
            found = (self.losses.get((seed, run, step)) for seed in "12")
            return ", ".join(f"{loss:.4f}" for loss in found if loss)
        if column in ("mass", "recall", "indexer KL"):
            of_layers = self.layers(run, step, column)
            digits = 2 if column == "recall" else 3
            return f"{numpy.mean(of_layers):.{digits}f}" if of_layers else ""
        if column == "mass, layer 1":
            return f"{found[0]:.2f}" if (found := self.layers(run, step, "mass")) else ""
        if column == "K/S":
            keys = re.fullmatch(r"sparse(?:_(\d+))?(?:_\D+)?", run)
            return f"1/{8192 // int(keys[1] or 2048)}" if keys else ""
        return self.of_times(column, run)

    def of_times(self, column, run):
        """Return the text of a cell of the table of times; of runs of both seeds, of seed 1, 2."""
        if column == "ms per step":
            of_seeds = (self.values("training", run, "milliseconds", seed=seed) for seed in "12")
            return ", ".join(f"{numpy.median(each):.0f}" for each in of_seeds if each)
        if column == "peak GiB":
            return f"{max(self.values('measures', run, 'value', measure='peak memory')):.2f}"
        name, digits = {"run, s": ("seconds", 0), "evaluation, s": ("evaluation_seconds", 0)}[
            column
        ]
        return ", ".join(f"{each:.{digits}f}" for each in self.values("runs", run, name))

    def table(self, lines):
        """Yield every row of a table: as it should be, and as it is."""
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        for row in rows:
            cells = dict(zip(header, row, strict=True))
            run = cells["run"].strip("`")
            step = int(cells.get("step") or self.last(run))
            to = re.match(r"`(\w+)`(?:, (\d+))?", cells.get("to", ""))
            other, at = (to[1], int(to[2] or step)) if to else ("dense_on", step)
            kept = ("run", "step", "to")
            if "to" in header and not to:
                kept += ("gap", "in %", "± documents", "± seeds", "seeds")
            found = {
                name: text if name in kept else self.cell(name, run, step, other, at)
                for name, text in cells.items()
            }
            yield found, cells


def tables(text):
    """Yield the lines of every table."""
    for block in re.findall(r"(?:^\|.*\|$\n)+", text, re.M):
        yield block.splitlines()


def percent(gap):
    return f"{100 * gap.value / gap.reference:.2f} %"


def said(on_gpu):
    """Yield figures in the sentences of the page, as they have to be."""
    gap = on_gpu.gap
    dense, fewer = (gap(run, 1020, "dense_on", 1020) for run in ("sparse", "sparse_1024"))
    yield (
        f"**{percent(dense)} higher** ({dense.value:+.4f} nats per token ± "
        f"{dense.over_documents:.4f} over documents, ± {dense.over_seeds:.4f} over two seeds)"
    )
    yield (
        f"{percent(fewer)} higher ({fewer.value:+.4f} ± {fewer.over_documents:.4f} "
        f"± {fewer.over_seeds:.4f})"
    )
    equal = [gap(run, 1020, "dense_on", 960) for run in ("sparse", "sparse_1024")]
    yield f"the gap is {percent(equal[0])} and {percent(equal[1])}"
    losses = [on_gpu.losses[seed, "dense", 840] for seed in "12"]
    tokens = 840 * 4 * 8192 / 1e6
    yield f"saw {tokens:.1f} M tokens and has a loss of {numpy.mean(losses):.1f} nats per token"
    brought = gap("dense_on", 1020, "dense_on", 960)
    yield f"a frozen warm-up leaves out ({-brought.value:.4f})"
    yield f"lower the loss by {percent(brought).removeprefix('-')} here"
    one_seed = [gap(run, 1020, "dense_on", 1020) for run in ("sparse_512", "sparse_256")]
    yield f"(one seed) the gap is {percent(one_seed[0])} and {percent(one_seed[1])}"
    keys = [gap(f"sparse_{keys}", 1020, "sparse", 1020) for keys in (1024, 512, 256)]
    yield f"1/8 is {percent(keys[0])} above 1/4"
    yield f"1/16 and 1/32 are {percent(keys[1])} and {percent(keys[2])} above it"

    again = [gap("dense_on_again", step, "dense_on", step) for step in (900, 960, 1020)]
    again_sparse = [gap("sparse_again", step, "sparse", step) for step in (960, 1020)]
    largest = [max(abs(each.value) for each in found) for found in (again, again_sparse)]
    yield f"differ by up to {largest[0]:.5f} dense and {largest[1]:.5f} sparse"
    absorbed = gap("sparse_absorbed", 960, "sparse", 960)
    yield f"differ by {abs(absorbed.value):.5f} at step 960"
    assert abs(absorbed.value) < largest[1]
    fp8 = [gap("sparse_fp8_scores", step, "sparse", step).value for step in (960, 1020)]
    yield f"differs by {fp8[0]:+.5f} and {fp8[1]:+.5f}"
    assert 1.5 < fp8[0] / again_sparse[0].value < 2.5 and abs(fp8[0]) < keys[0].value

    early = [gap("sparse_256", 1020, "dense_on", 1020, band).value
             for band in ("0-1024", "4096-8192")]  # fmt: skip
    yield f"from {early[0]:+.4f} in the first 1024 tokens to {early[1]:+.4f} in the second half"
    mass, best = ([on_gpu.layers(run, 1020, measure) for run in ("sparse", "sparse_256")]
                  for measure in ("mass", "best mass"))  # fmt: skip
    yield (
        f"{mass[0][0]:.2f} of it with K/S = 1/4 and {mass[1][0]:.2f} with 1/32, the best K keys "
        f"{best[0][0]:.2f} and {best[1][0]:.2f}; layers 11 and 12 come next ({mass[1][10]:.2f} "
        f"and {mass[1][11]:.2f} with 1/32)"
    )
    selecting = {row["run"] for row in on_gpu.files["measures"] if row["measure"] == "mass"}
    for run in selecting:
        assert numpy.argmin(on_gpu.layers(run, on_gpu.last(run), "mass")) == 0, run
    assert set(numpy.argsort(mass[1])[:3]) == {0, 10, 11}
    wide, narrow = (on_gpu.layers(run, 1020, "recall") for run in ("sparse", "sparse_256"))
    least = numpy.argmin(narrow)
    yield f"Recall is least in layer {least + 1} with K/S = 1/32 ({narrow[least]:.2f})"
    yield f"with 1/4 it is {min(wide):.2f} to {max(wide):.2f} in all layers"
    high, low = map(numpy.mean, mass)
    most = numpy.mean(best[0])
    yield (
        f"low ({numpy.mean(wide):.2f} with K/S = 1/4) where mass is high ({high:.3f}; "
        f"the best K keys have {most:.3f})"
    )
    # Selected keys that are not among the best have at most what is left of all attention.
    assert most - high < 0.012 and 1 - most < 0.002
    yield f"as it falls from {high:.3f} to {low:.3f}"

    seconds = {(row["seed"], row["run"]): int(row["seconds"]) for row in on_gpu.files["runs"]}
    yield f"The {len(seconds)} runs took {sum(seconds.values()) / 3600:.2f} GPU hours"
    default = ("dense", "dense_on", "warmup", "sparse", "sparse_1024", "sparse_without_warmup")
    each = [sum(seconds[seed, run] for run in default) for seed in "12"]
    yield f"took {each[0]} s (seed 1) and {each[1]} s (seed 2)"
    yield f"GPU30=1 examples/conversion/all.sh # {each[0] / 60:.0f} minutes on one H200"
    evaluations = [on_gpu.of_times("evaluation, s", run)
                   for run in ("sparse_absorbed", "sparse", "sparse_256")]  # fmt: skip
    yield "took {} s against {} s, and of `sparse_256` {} s".format(
        evaluations[0], evaluations[1].split(", ")[0], evaluations[2]
    )
    yield f"(peak of `sparse` on the H200: {on_gpu.of_times('peak GiB', 'sparse')} GiB)"

    without = {step: gap("sparse_without_warmup", step, "dense_on", step) for step in (900, 1020)}
    yield f"smaller at equal tokens ({percent(without[1020])})"
    yield f"larger at equal updates ({percent(without[1020])} against {percent(equal[0])})"
    first, later = (
        sorted(on_gpu.values("training", "sparse_without_warmup", "mass", step=step))
        for step in ("841", "900")
    )
    yield (
        f"{first[0]:.2f} to {first[1]:.2f} of the attention in the first step, {later[0]:.2f} "
        f"to {later[1]:.2f} after 60, and the gap is {percent(without[900])} there"
    )
    right = {True: [], False: []}
    for run in {name for _, name, _ in on_gpu.losses}:
        for part in ("1024", "2048", "4096", "7168", "none"):
            chosen = {"step": str(on_gpu.last(run)), "part": part}
            right[part == "none"] += on_gpu.values(
                "measures", run, "value", measure="copy", **chosen
            )
            assert not any(on_gpu.values("measures", run, "value", measure="look-up", **chosen))
    yield (
        f"right in {min(right[False]):.2f} to {max(right[False]):.2f} of cases and guesses without "
        f"the passage in {min(right[True]):.2f} to {max(right[True]):.2f}"
    )
    bands = [
        [on_gpu.values("measures", "dense_on", column, step="1020", measure="loss", part=band)
         for band in ("0-1024", "1024-4096", "4096-8192")]
        for column in ("value", "error")
    ]  # fmt: skip
    yield "has {:.3f}, {:.3f} and {:.3f} (mean".format(*numpy.mean(bands[0], 1))
    yield f"of {numpy.min(bands[1]):.2f} to {numpy.max(bands[1]):.2f}."


@pytest.fixture(scope="module")
def on_gpu():
    return OnGPU()


def test_the_page_has_the_figures_of_the_runs_on_a_gpu(on_gpu):
    """Every cell of its tables."""
    runs, columns = set(), set()
    for lines in tables(section("Results")):
        for expected, written in on_gpu.table(lines):
            assert written == expected
            runs.add(written["run"].strip("`"))
            columns |= set(written)
    assert runs == {run for _, run, _ in on_gpu.losses}
    assert {"gap", "± documents", "± seeds", "mass", "difference", "4096-8192", "run, s"} <= columns


def test_the_page_says_what_follows_from_its_tables(on_gpu):
    """Figures in its sentences."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for figure in said(on_gpu):
        assert " ".join(figure.split()) in text, figure


def test_runs_on_a_gpu_have_the_whole_held_out_set(on_gpu):
    """Losses of documents are of 148 sequences, and are those that Megatron logged."""
    for session in on_gpu.sessions:
        for run, steps in session.documents.items():
            for step, sums in steps.items():
                tokens = sum(n for _, n in sums.values())
                assert tokens == 148 * 8192
                mean = sum(loss for loss, _ in sums.values()) / tokens
                assert mean == pytest.approx(on_gpu.losses[str(session.seed), run, step], abs=2e-5)


def test_the_page_has_the_figures_of_the_csv():
    """Losses of three seeds, and their gaps to ``dense_on`` with the mean and standard error."""
    losses = {}
    with open(FOLDER / "small_cpu.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["run"], int(row["step"]))
            losses.setdefault(key, {})[row["seed"]] = float(row["validation_loss"])
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| ([\d., ]+) \| (?:`dense_on`, (\d+)[\w, ]* \| (\S+) ± (\S+))?",
        section("The small version"), re.M,
    )  # fmt: skip
    assert {name for name, *_ in rows} == {name for name, _ in losses}
    assert sum(bool(against) for *_, against, _, _ in rows) >= 4
    for name, step, written, against, mean, error in rows:
        curve = losses[name, int(step)]
        assert written == ", ".join(f"{curve[seed]:.3f}" for seed in "123")
        if against:
            reference = losses["dense_on", int(against)]
            gaps = numpy.array([curve[seed] - reference[seed] for seed in "123"])
            assert mean == f"{gaps.mean():+.3f}"
            assert error == f"{gaps.std(ddof=1) / 3**0.5:.3f}"
