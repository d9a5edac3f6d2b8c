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


#: Section of the page -> folder of its CSVs.
STUDIES = {"Results": "gpu30_longer", "A shorter training": "gpu30"}
#: The same, with the section that compares runs with an equal one.
SECTIONS = STUDIES | {"Variants": "gpu30_variants"}
BANDS = ("0-1024", "1024-4096", "4096-8192")


class OnGPU:
    """What the cells of the page's tables of the runs on a GPU have to be, from their CSVs.

    Every method is a column: given the run, the last step or that of the row, and the run and the
    step that it is compared with. ``dense``, ``warmed`` and ``end`` are the last steps of the dense
    model, of the warm-up and of all other runs, ``earlier`` that with as many updates.
    """

    def __init__(self, folder):
        self.folder = FOLDER / folder
        seeds = module("seeds")
        self.sessions, settings, warmup = seeds.sessions([self.folder])
        self._gap_of, read = seeds.gap_of, module("table").read
        dense, sparse, batch = re.search(r"steps (\d+) \d+ (\d+),.* batch (\d+)", settings).groups()
        self.dense, self.warmed = int(dense), int(dense) + warmup
        self.end, self.earlier = self.warmed + int(sparse), self.warmed + int(sparse) - warmup
        self.tokens_per_step = int(batch) * 8192
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

    def gap(self, run, step, other, at, band=None, seeds_of=None):
        """Return the gap in all positions or in a band, over all seeds or those of a run."""
        found = [each for each in self.sessions if seeds_of is None or seeds_of in each.documents]
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
        if column in BANDS:
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
        if column in ("mass", "best mass", "recall", "indexer KL"):
            of_layers = self.layers(run, step, column)
            digits = 2 if column == "recall" else 3
            return f"{numpy.mean(of_layers):.{digits}f}" if of_layers else ""
        if column.startswith("mass, layer "):
            found = self.layers(run, step, "mass")
            return f"{found[int(column.split()[-1]) - 1]:.2f}" if found else ""
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


def both_errors(gap):
    return f"{gap.value:+.4f} ± {gap.over_documents:.4f} ± {gap.over_seeds:.4f}"


def difference(gap):
    return f"{gap.value:+.5f} ± {gap.over_documents:.5f}"


def gaps(study, band=None, at=None):
    """Return the gaps of K/S = 1/4 and 1/8 at equal tokens, or to another step."""
    runs = ("sparse", "sparse_1024")
    return [study.gap(run, study.end, "dense_on", at or study.end, band) for run in runs]


def mean_loss(study):
    """Return the loss of the dense model, which the others start from."""
    return numpy.mean([study.losses[seed, "dense", study.dense] for seed in "12"])


def dense_tokens(study):
    return study.dense * study.tokens_per_step / 1e6


def mean_mass(study, run, measure="mass"):
    return numpy.mean(study.layers(run, study.end, measure))


def band_losses(study, column="value"):
    """Return losses of ``dense_on`` by band and seed, or their errors."""
    chosen = {"step": str(study.end), "measure": "loss"}
    return numpy.array(
        [study.values("measures", "dense_on", column, part=band, **chosen) for band in BANDS]
    )


def copies(study):
    """Return least and most copies that are right, and guesses, and the most look-ups."""
    right, none, found = [], [], []
    for run in {name for _, name, _ in study.losses}:
        chosen = {"step": str(study.last(run))}
        for part in ("1024", "2048", "4096", "7168"):
            right += study.values("measures", run, "value", measure="copy", part=part, **chosen)
            found += study.values("measures", run, "value", measure="look-up", part=part, **chosen)
        none += study.values("measures", run, "value", measure="copy", part="none", **chosen)
    return min(right), max(right), min(none), max(none), max(found)


def late_gain(longer, shorter):
    """Return how much more the loss fell in the second half than at the start, and its error.

    Per seed, with the standard error over documents, which have the same tokens in both studies.
    """
    for mine, theirs in zip(longer.sessions, shorter.sessions, strict=True):
        mine, theirs = (
            mine.documents["dense_on"][longer.end],
            theirs.documents["dense_on"][shorter.end],
        )
        fell = {}
        for key, (loss, tokens) in mine.items():
            before, same = theirs[key]
            assert tokens == same
            fell[key] = (before - loss) / tokens
        more = [fell[n, BANDS[2]] - fell[n, BANDS[0]] for n, band in fell if band == BANDS[2]]
        assert len(more) == 49
        yield numpy.mean(more), numpy.std(more, ddof=1) / len(more) ** 0.5


def said(longer, shorter):
    """Yield figures in the sentences of the page, as they have to be."""
    yield from said_first(longer, shorter)
    yield from said_of_longer(longer)
    yield from said_of_comparison(longer, shorter)
    yield from said_of_shorter(shorter)
    yield from said_of_times(longer, shorter)
    yield from said_of_warm_ups(longer, shorter)
    yield from said_of_probes(longer, shorter)


def said_first(longer, shorter):
    """Yield the figures of the headline."""
    wide, narrow = gaps(longer)
    yield f"trained on {dense_tokens(longer):.1f} M tokens"
    yield (
        f"**{percent(wide)} higher** ({wide.value:+.4f} nats per token ± "
        f"{wide.over_documents:.4f} over documents, ± {wide.over_seeds:.4f} over two seeds)"
    )
    yield f"with K/S = 1/8 with one {percent(narrow)} higher ({both_errors(narrow)})"
    wide, narrow = gaps(longer, at=longer.earlier)
    yield (
        f"{longer.end - longer.earlier} steps earlier, the gap is {percent(wide)} "
        f"({both_errors(wide)}) and {percent(narrow)} ({both_errors(narrow)})"
    )
    brought = longer.gap("dense_on", longer.end, "dense_on", longer.earlier)
    yield f"a frozen warm-up leaves out ({-brought.value:.4f})"
    assert all(-brought.value > gap.value / 2 for gap in gaps(longer))  # most of the gap
    wide, narrow = gaps(shorter)
    one_seed = [
        shorter.gap(f"sparse_{keys}", shorter.end, "dense_on", shorter.end) for keys in (512, 256)
    ]
    yield (
        f"After {dense_tokens(shorter):.1f} M tokens the gaps were {percent(wide)} and "
        f"{percent(narrow)}, and with K/S of 1/16 and 1/32 (one seed) {percent(one_seed[0])} and "
        f"{percent(one_seed[1])}"
    )
    yield f"has a loss of {mean_loss(longer):.2f} nats per token"


def said_of_longer(study):
    gap, end = study.gap, study.end
    of_seeds = [
        {seed: study.losses[seed, run, step] - study.losses[seed, "dense_on", step]
         for seed in "12"}
        for run, step in (("sparse", end), ("warmup", study.warmed))
    ]  # fmt: skip
    yield (
        f"{of_seeds[0]['1']:+.4f} with seed 1 and {of_seeds[0]['2']:+.4f} with seed 2. The models "
        f"that were only frozen are further apart at step {study.warmed}: "
        f"{of_seeds[1]['1']:+.4f} and {of_seeds[1]['2']:+.4f}"
    )
    assert abs(of_seeds[1]["2"] - of_seeds[1]["1"]) > of_seeds[0]["2"] - of_seeds[0]["1"]
    steps = (study.warmed, study.earlier, end)
    again = [gap("dense_on_again", step, "dense_on", step) for step in steps]
    again += [gap("sparse_again", step, "sparse", step) for step in steps[1:]]
    yield f"differ by up to {max(abs(each.value) for each in again):.5f}"
    fewer = gap("sparse_1024", end, "sparse", end)
    yield f"1/8 is {percent(fewer)} above 1/4"

    first = gaps(study, BANDS[0])
    brought = gap("dense_on", end, "dense_on", study.earlier, BANDS[0])
    yield (
        f"gaps of {first[0].value:+.4f} and {first[1].value:+.4f} there are what the missing "
        f"updates bring ({-brought.value:.4f})"
    )
    late = gaps(study, BANDS[2], study.earlier)
    early = gaps(study, BANDS[0], study.earlier)
    yield f"equal updates they are {early[0].value:+.4f} and {early[1].value:+.4f} there"
    yield (
        f"{percent(late[0])} ({both_errors(late[0])}) and {percent(late[1])} "
        f"({both_errors(late[1])}) in the second half"
    )
    mass, best, narrow = (
        study.layers(run, end, measure)
        for run, measure in (("sparse", "mass"), ("sparse", "best mass"), ("sparse_1024", "mass"))
    )
    assert numpy.argmin(mass) == numpy.argmin(best) == numpy.argmin(narrow) == 1
    of_seeds = [
        [study.values("measures", run, "value", seed=seed, step=str(end), measure=measure,
                      part="layer 2")[0] for seed in "12"]
        for run, measure in (("sparse", "mass"), ("sparse", "best mass"), ("sparse_1024", "mass"))
    ]  # fmt: skip
    yield (
        "hold {:.2f} and {:.2f} of it with K/S = 1/4 (seeds 1 and 2), of at most {:.2f} and "
        "{:.2f}, and {:.2f} and {:.2f} with 1/8".format(*numpy.ravel(of_seeds))
    )
    recall = study.layers("sparse", end, "recall")
    least, most = numpy.argmin(recall), numpy.argmax(recall)
    yield (
        f"Recall with K/S = 1/4 is {recall[least]:.2f} (layer {least + 1}) to "
        f"{recall[most]:.2f} (layer {most + 1})"
    )


def said_of_comparison(longer, shorter):
    times = dense_tokens(longer) / dense_tokens(shorter), longer.dense / shorter.dense
    yield f"{times[0]:.1f} times the tokens and {times[1]:.1f} times the updates"
    yield f"fell from {mean_loss(shorter):.2f} to {mean_loss(longer):.2f}"
    for after, before in zip(gaps(longer), gaps(shorter), strict=True):
        yield (
            f"{after.value:+.4f} ± {after.over_seeds:.4f} (over seeds) after {before.value:+.4f} "
            f"± {before.over_seeds:.4f}"
        )
        assert abs(after.value - before.value) < 1.1 * after.over_seeds
    yield (
        f"in percent it rose from {percent(gaps(shorter)[0])} to {percent(gaps(longer)[0])} and "
        f"from {percent(gaps(shorter)[1])} to {percent(gaps(longer)[1])}"
    )
    grew = [
        [late.value - early.value
         for early, late in zip(gaps(study, BANDS[0]), gaps(study, BANDS[2]), strict=True)]
        for study in (shorter, longer)
    ]  # fmt: skip
    yield (
        f"rose from {grew[0][0]:.4f} to {grew[1][0]:.4f} (1/4) and from {grew[0][1]:.4f} to "
        f"{grew[1][1]:.4f} (1/8)"
    )
    of_both = [
        [mean_mass(study, run, measure) for study in (shorter, longer)]
        for run, measure in (("sparse", "mass"), ("sparse_1024", "mass"), ("sparse", "best mass"))
    ]
    yield (
        "The mass fell from {:.3f} to {:.3f} (1/4) and from {:.3f} to {:.3f} (1/8), and that of "
        "the best K keys with it, from {:.3f} to {:.3f}".format(*numpy.ravel(of_both))
    )
    few, fewest = mean_mass(longer, "sparse_1024"), mean_mass(shorter, "sparse_256")
    assert few < fewest
    assert gaps(longer)[1].value < shorter.gap("sparse_256", shorter.end, "dense_on",
                                               shorter.end).value  # fmt: skip
    yield f"with 1/8 ({few:.3f}) than the shorter one with 1/32 ({fewest:.3f}), and a smaller gap"
    for study, runs in ((longer, ("", "_1024")), (shorter, ("", "_1024", "_512", "_256"))):
        masses = [mean_mass(study, f"sparse{run}") for run in runs]
        apart = [study.gap(f"sparse{run}", study.end, "dense_on", study.end).value for run in runs]
        assert masses == sorted(masses, reverse=True) and apart == sorted(apart)
    late = [gaps(study, BANDS[2], study.earlier) for study in (longer, shorter)]
    yield f"at equal updates {percent(late[0][0])} and {percent(late[0][1])} in the second half"
    assert all(after.value > 0 > before.value for after, before in zip(*late, strict=True))
    for study in (longer, shorter):  # the same number of tokens for what follows the dense model
        assert (study.end - study.dense) * study.tokens_per_step == 720 * 8192
        assert (study.warmed - study.dense) * study.tokens_per_step == 240 * 8192
    yield f"the same {720 * 8192 / 1e6:.1f} M tokens, {240 * 8192 / 1e6:.1f} M of them warm-up"


def said_of_shorter(study):
    gap, end = study.gap, study.end
    wide, narrow = gaps(study, at=study.earlier)
    brought = gap("dense_on", end, "dense_on", study.earlier)
    assert all(each.value < 0 < gap.value < -brought.value
               for each, gap in zip((wide, narrow), gaps(study), strict=True))  # fmt: skip
    yield f"than what {study.warmed - study.dense} updates bring ({-brought.value:.4f})"
    keys = [gap(f"sparse_{keys}", end, "sparse", end) for keys in (1024, 512, 256)]
    yield f"1/8, 1/16 and 1/32 are {percent(keys[0])}, {percent(keys[1])} and {percent(keys[2])}"

    steps = (study.warmed, study.earlier, end)
    again = [gap("dense_on_again", step, "dense_on", step) for step in steps]
    again_sparse = [gap("sparse_again", step, "sparse", step) for step in steps[1:]]
    largest = [max(abs(each.value) for each in found) for found in (again, again_sparse)]
    yield f"differ by up to {largest[0]:.5f} dense and {largest[1]:.5f} sparse"
    absorbed = gap("sparse_absorbed", study.earlier, "sparse", study.earlier)
    yield f"differ by {difference(absorbed)} at step {study.earlier}"
    assert abs(absorbed.value) < largest[1]
    fp8 = [gap("sparse_fp8_scores", step, "sparse", step) for step in steps[1:]]
    yield (
        f"differs by {difference(fp8[0])} at step {study.earlier} and {difference(fp8[1])} at step "
        f"{end}"
    )
    assert 1.5 < fp8[0].value / again_sparse[0].value < 2.5 and fp8[1].value > 0
    assert again_sparse[1].value < 0

    selecting = {row["run"] for row in study.files["measures"] if row["measure"] == "mass"}
    for run in selecting:
        assert numpy.argmin(study.layers(run, study.last(run), "mass")) == 0, run
    few = study.layers("sparse_256", end, "recall")
    least = numpy.argmin(few)
    yield f"Recall is least in layer {least + 1} with K/S = 1/32 ({few[least]:.2f})"


def said_of_times(longer, shorter):
    default = ("dense", "dense_on", "warmup", "sparse", "sparse_1024", "sparse_without_warmup")
    for study, gpu in ((longer, "H100"), (shorter, "H200")):
        seconds = {(row["seed"], row["run"]): int(row["seconds"]) for row in study.files["runs"]}
        yield f"{len(seconds)} runs took {sum(seconds.values()) / 3600:.2f} GPU hours"
        minutes = sum(seconds["1", run] for run in default) / 60
        yield f"examples/conversion/all.sh # {minutes:.0f} minutes on one {gpu}"
    absorbed, masked, few = (
        shorter.of_times("evaluation, s", run).split(", ")[0]
        for run in ("sparse_absorbed", "sparse", "sparse_256")
    )
    yield f"took {absorbed} s against {masked} s, and of `sparse_256` {few} s"
    peaks = [study.of_times("peak GiB", "sparse") for study in (shorter, longer)]
    assert peaks[0] == peaks[1]
    yield f"(peak of `sparse` on both GPUs: {peaks[0]} GiB)"


def said_of_warm_ups(longer, shorter):
    run = "sparse_without_warmup"
    found = [
        (study.gap(run, study.end, "dense_on", study.end), study.gap(run, study.end, "sparse",
                                                                     study.end))
        for study in (longer, shorter)
    ]  # fmt: skip
    yield (
        f"smaller at equal tokens ({percent(found[0][0])}, {-found[0][1].value:.4f} less than with "
        f"one; after the shorter training {percent(found[1][0])}, {-found[1][1].value:.4f} less)"
    )
    wide = [
        study.gap("sparse", study.end, "dense_on", study.earlier, seeds_of=run)
        for study in (longer, shorter)
    ]
    yield (
        f"larger at equal updates ({percent(found[0][0])} against {percent(wide[0])}, and "
        f"{percent(found[1][0])} against {percent(wide[1])}; the longer one with seed 1 alone)"
    )
    brought = [
        study.gap("dense_on", study.end, "dense_on", study.earlier) for study in (longer, shorter)
    ]
    assert percent(brought[0]) == percent(brought[1])
    yield f"lower the loss by {percent(brought[0]).removeprefix('-')} in both studies"
    masses = [
        sorted(study.values("training", run, "mass", step=str(step)))
        for study in (longer, shorter)
        for step in (study.dense + 1, study.warmed)
    ]
    yield (
        f"hold {masses[0][0]:.2f} of the attention in the first step ({masses[2][0]:.2f} to "
        f"{masses[2][1]:.2f} after the shorter training) and {masses[1][0]:.2f} "
        f"({masses[3][0]:.2f} to {masses[3][1]:.2f}) after as many steps as the warm-up has"
    )


def said_of_probes(longer, shorter):
    *of_copies, found = copies(longer)
    *before, none = copies(shorter)
    yield (
        "right in {:.2f} to {:.2f} of cases and guesses without the passage in {:.2f} to {:.2f} "
        "({:.2f} to {:.2f} and {:.2f} to {:.2f} after the shorter training)".format(
            *of_copies, *before
        )
    )
    assert none == 0
    yield f"look-ups are right in at most {found:.3f}"
    values = [numpy.mean(band_losses(study), 1) for study in (longer, shorter)]
    errors = band_losses(longer, "error")
    yield "`dense_on` has {:.3f}, {:.3f} and {:.3f} (mean".format(*values[0])
    yield "after {:.3f}, {:.3f} and {:.3f} in the shorter training".format(*values[1])
    yield f"errors over documents of {errors.min():.2f} to {errors.max():.2f}"
    gains = list(late_gain(longer, shorter))
    yield "by {:.3f} ± {:.3f} and {:.3f} ± {:.3f} more".format(*gains[0], *gains[1])
    fell = values[1] - values[0]
    assert fell[1] - fell[0] > 10 * (fell[2] - fell[1])
    yield "({:.3f}, {:.3f} and {:.3f} in the three bands)".format(*fell)
    wide, best = (mean_mass(longer, "sparse", measure) for measure in ("mass", "best mass"))
    recall = mean_mass(longer, "sparse", "recall")
    yield (
        f"low ({recall:.2f} with K/S = 1/4) where mass is {wide:.3f} and the best K keys have "
        f"{best:.3f}"
    )


@pytest.fixture(scope="module")
def studies():
    return {section: OnGPU(folder) for section, folder in SECTIONS.items()}


@pytest.mark.parametrize("title", STUDIES)
def test_the_page_has_the_figures_of_the_runs_on_a_gpu(studies, title):
    """Every cell of its tables."""
    study, runs, columns = studies[title], set(), set()
    for lines in tables(section(title)):
        for expected, written in study.table(lines):
            assert written == expected
            runs.add(written["run"].strip("`"))
            columns |= set(written)
    runs |= set(re.findall(r"`(\w+)`", section(title)))
    named_elsewhere = {"dense_on_again", "sparse_again", "warmup"}
    assert {run for _, run, _ in study.losses} - runs <= named_elsewhere
    assert {"gap", "± documents", "± seeds", "mass", "4096-8192", "recall"} <= columns


def test_the_page_says_what_follows_from_its_tables(studies):
    """Figures in its sentences."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    missing = [
        figure for figure in said(*(studies[title] for title in STUDIES)) if figure not in text
    ]
    assert not missing, "\n".join(missing)


def test_the_page_has_the_figures_of_the_variants(studies):
    """Cells and sentences; variants differ from the run without as equal runs do."""
    study, cells, apart = studies["Variants"], 0, {}
    for lines in tables(section("Variants")):
        for expected, written in study.table(lines):
            assert written == expected
            cells += 1
    assert cells == 6
    steps = (study.earlier, study.end)
    for variant in ("again", "absorbed", "fp8_scores"):
        found = [study.gap(f"sparse_{variant}", step, "sparse", step) for step in steps]
        apart[variant] = max(abs(gap.value) for gap in found)
        for measure in ("mass", "recall", "indexer KL"):
            one, other = (mean_mass(study, run, measure) for run in ("sparse", f"sparse_{variant}"))
            assert abs(one - other) < 2e-4
    text = " ".join(section("Variants").split())
    largest, loss = max(apart.values()), study.losses["1", "sparse", study.end]
    assert f"at most {largest:.5f} apart ({100 * largest / loss:.3f} % of the loss)" in text
    assert largest < 2 * apart["again"]
    dense = study.losses["1", "dense", study.dense]
    before = studies["A shorter training"].losses["1", "dense", study.dense]
    assert f"has a loss of {dense:.4f}, not {before:.4f}" in text
    times = (study.of_times("evaluation, s", run) for run in ("sparse_absorbed", "sparse"))
    assert "`sparse_absorbed` takes {} s against {} s".format(*times) in text


@pytest.mark.parametrize("title", SECTIONS)
def test_runs_on_a_gpu_have_the_whole_held_out_set(studies, title):
    """Losses of documents are of 148 sequences, and are those that Megatron logged."""
    study = studies[title]
    for session in study.sessions:
        for run, steps in session.documents.items():
            for step, sums in steps.items():
                tokens = sum(n for _, n in sums.values())
                assert tokens == 148 * 8192
                mean = sum(loss for loss, _ in sums.values()) / tokens
                assert mean == pytest.approx(study.losses[str(session.seed), run, step], abs=2e-5)


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
