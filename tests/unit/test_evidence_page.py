"""``docs/evidence.md`` and the study's page: figures equal the CSVs of ``examples/conversion``."""

import csv
import dataclasses
import re

import numpy
import pytest

from tests.cases.conversion import FOLDER, module
from tests.cases.launch_scripts import EXAMPLES

PAGE = EXAMPLES.parent / "docs/evidence.md"
STUDY = EXAMPLES.parent / "docs/develop/conversion_study.md"


def section(title, page=PAGE):
    """Return the text of a section of a page."""
    return page.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


#: Section of the page -> folder of its CSVs.
STUDIES = {"Results": "gpu30_longer", "A shorter training": "gpu30"}
#: The same, with the section that compares runs with an equal one.
SECTIONS = STUDIES | {"Variants": "gpu30_variants"}
BANDS = ("0-1024", "1024-4096", "4096-8192")


class OnGPU:
    """Expected cells of the page's tables of GPU runs, from their CSVs.

    Every method is a column: given the run, the last step or the line's, and the run and step for
    comparison. ``dense``, ``warmed`` and ``end`` are the last steps of the dense model, of the
    warm-up and of all other runs, ``earlier`` has as many updates.
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
        chosen = {key.replace("_", " "): value for key, value in chosen.items()} | {"run": run}
        rows = self.files[file]
        return [
            float(row[column])
            for row in rows
            if all(row[key] == value for key, value in chosen.items())
        ]

    def layers(self, run, step, measure):
        return [
            numpy.mean(found)
            for n in range(1, 13)
            if (found := self.values("measures", run, "value", step=str(step), measure=measure,
                                     part=f"layer {n}"))
        ]  # fmt: skip

    def last(self, run):
        return max(step for _, name, step in self.losses if name == run)

    def gap(self, run, step, other, at, band=None, seeds_of=None):
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
        if column == "K/S":
            keys = re.fullmatch(r"sparse(?:_(\d+))?(?:_\D+)?", run)
            return f"1/{8192 // int(keys[1] or 2048)}" if keys else ""
        raise ValueError(f"no column {column}")

    def table(self, lines):
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
    for block in re.findall(r"(?:^\|.*\|$\n)+", text, re.M):
        yield block.splitlines()


def percent(gap):
    return f"{100 * gap.value / gap.reference:.2f} %"


def gaps(study, band=None, at=None):
    """Return the gaps of K/S = 1/4 and 1/8 at equal tokens, or to another step."""
    runs = ("sparse", "sparse_1024")
    return [study.gap(run, study.end, "dense_on", at or study.end, band) for run in runs]


def mean_loss(study):
    """Return the loss of the dense model from which the others start."""
    return numpy.mean([study.losses[seed, "dense", study.dense] for seed in "12"])


def dense_tokens(study):
    return study.dense * study.tokens_per_step / 1e6


def mean_mass(study, run, measure="mass"):
    return numpy.mean(study.layers(run, study.end, measure))


def grows(study):
    """Return how much the gap of K/S = 1/4 grows from the first band to the last."""
    first, last = (gaps(study, band)[0].value for band in (BANDS[0], BANDS[-1]))
    return last - first


def headline(longer, shorter):
    """Yield the figures of the page's result sentences."""
    wide, _ = gaps(longer)
    equal, _ = gaps(longer, at=longer.earlier)
    yield f"trained on {dense_tokens(longer):.1f} M tokens"
    yield f"**{percent(wide)} higher** than the same model that stayed dense"
    yield f"whose {longer.end - longer.earlier} steps train the indexer"
    yield f"equal updates, the gap is {percent(equal)}"
    second = gaps(longer, BANDS[-1], longer.earlier)
    yield "the second half has {} (1/4) and {} (1/8)".format(*map(percent, second))
    brought = longer.gap("dense_on", longer.end, "dense_on", longer.earlier)
    assert all(-brought.value > gap.value / 2 for gap in gaps(longer))  # most of the gap
    wide, narrow = gaps(shorter)
    one_seed = [
        shorter.gap(f"sparse_{keys}", shorter.end, "dense_on", shorter.end) for keys in (512, 256)
    ]
    yield (
        f"After {dense_tokens(shorter):.1f} M tokens the gaps were {percent(wide)} (1/4) and "
        f"{percent(narrow)} (1/8), and with K/S of 1/16 and 1/32 (one seed) "
        f"{percent(one_seed[0])} and {percent(one_seed[1])}"
    )
    yield f"the loss fell from {mean_loss(shorter):.2f} to {mean_loss(longer):.2f}"
    yield f"({grows(longer):.4f} against {grows(shorter):.4f} with 1/4)"


@pytest.fixture(scope="module")
def studies():
    return {section: OnGPU(folder) for section, folder in SECTIONS.items()}


def test_the_chart_has_the_gaps_of_the_studies(studies, tmp_path):
    """``python keys.py gpu30_longer gpu30 keys.png`` draws the committed one."""
    pytest.importorskip("matplotlib")
    chart = module("keys").chart(FOLDER / "gpu30_longer", FOLDER / "gpu30")
    assert chart.draw(tmp_path / "keys.png").read_bytes().startswith(b"\x89PNG")
    assert "conversion/keys.png)" in PAGE.read_text(encoding="utf-8")
    lines = iter(chart.lines.values())
    for title in ("A shorter training", "Results"):
        study = studies[title]
        for at in (study.end, study.earlier):
            for (_, ratio, _), run in zip(next(lines), ("sparse", "sparse_1024"), strict=False):
                gap = study.gap(run, study.end, "dense_on", at)
                assert ratio == pytest.approx(1 + gap.value / gap.reference)
    assert "by 0.26 %, by 0.04 % at equal updates" in chart.title


@pytest.mark.parametrize("title", STUDIES)
def test_the_page_has_the_figures_of_the_runs_on_a_gpu(studies, title):
    study, runs, columns = studies[title], set(), set()
    for lines in tables(section(title)):
        for expected, written in study.table(lines):
            assert written == expected
            runs.add(written["run"].strip("`"))
            columns |= set(written)
    runs |= set(re.findall(r"`(\w+)`", section(title)))
    named_elsewhere = {"dense_on_again", "sparse_again", "warmup"}
    assert {run for _, run, _ in study.losses} - runs <= named_elsewhere
    by_position = {"4096-8192", "recall"} if title == "Results" else set()
    assert {"gap", "± documents", "± seeds", "mass"} | by_position <= columns


def test_the_page_says_what_follows_from_its_tables(studies):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    figures = headline(*(studies[title] for title in STUDIES))
    assert [figure for figure in figures if figure not in text] == []


def test_the_page_has_the_figures_of_the_variants(studies):
    """Variants must differ from their base run as little as equal runs."""
    study, apart = studies["Variants"], {}
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


def test_the_page_has_the_figures_of_shares_of_the_queries():
    """The default must be the smallest harmless share."""
    study, cells = OnGPU("gpu30_shares"), 0
    for lines in tables(section("A share of the queries")):
        for expected, written in study.table(lines):
            if "to" in written and not written["to"]:
                expected |= {"difference": "", "± seeds": ""}
            assert written == expected
            cells += 1
    assert cells == 8
    end, text = study.end, " ".join(section("A share of the queries").split())
    kl = {run: mean_mass(study, run, "indexer KL") for run in ("sparse", "sparse_q8")}
    assert f"KL is {kl['sparse_q8'] / kl['sparse'] - 1:.1%} higher".replace("%", " %") in text
    warm = [numpy.mean(study.layers(f"warmup{x}", 900, "indexer KL")) for x in ("", "_q8")]
    assert f"and {warm[1] / warm[0] - 1:.1%} after".replace("%", " %") in text
    gap = study.gap("sparse_q8", end, "sparse", end)
    frozen = study.gap("sparse_frozen", end, "sparse", end)
    assert f"{gap.value:.5f} ± {gap.over_documents:.5f} above" in text
    assert f"frozen indexer costs {frozen.value:.5f}" in text and gap.value < frozen.value / 10
    equal = [
        abs(study.losses[s, "sparse_again", step] - study.losses[s, "sparse", step])
        for s in "12"
        for step in (960, end)
    ]
    assert f"equal runs differ by up to {max(equal):.5f}" in text
    for measure in ("mass", "recall"):
        for run in ("q4", "q8", "q8h4"):
            other = mean_mass(study, f"sparse_{run}", measure)
            assert abs(mean_mass(study, "sparse", measure) - other) < 1e-3


@pytest.mark.parametrize("title", SECTIONS)
def test_runs_on_a_gpu_have_the_whole_held_out_set(studies, title):
    study = studies[title]
    for session in study.sessions:
        for run, steps in session.documents.items():
            for step, sums in steps.items():
                tokens = sum(n for _, n in sums.values())
                assert tokens == 148 * 8192
                mean = sum(loss for loss, _ in sums.values()) / tokens
                assert mean == pytest.approx(study.losses[str(session.seed), run, step], abs=2e-5)


def test_the_page_has_the_figures_of_the_csv():
    losses = {}
    with open(FOLDER / "small_cpu.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["run"], int(row["step"]))
            losses.setdefault(key, {})[row["seed"]] = float(row["validation_loss"])
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| ([\d., ]+) \| (?:`dense_on`, (\d+)[\w, ]* \| (\S+) ± (\S+))?",
        section("The small version", STUDY), re.M,
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
