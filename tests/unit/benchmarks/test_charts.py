"""Charts and tables of comparisons: what they compute, and that the committed ones are theirs."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import appendix
from benchmarks.comparisons import COMPARISONS, Comparison, Line, ratios, table, with_blocks
from benchmarks.rows import latest, read_csv

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
PAGE = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")


def row(date, way, value, tokens=4096, metric="ms", gpu="GPU", part="step", versions=(), **case):
    return {"date": f"2026-11-{date}+00:00", "gpu": gpu, "way": way, "part": part, "value": value,
            "versions": dict(versions),
            "metric": metric, "case": {"tokens": tokens} | case,
            "status": "failed" if value is None else "ok"}  # fmt: skip


LINE = Line("a line", "ours", "dense")
COMPARISON = Comparison("name", "layer", "", (), "time (ms)", (LINE,), gpu="GPU")


def test_times_are_compared_within_the_last_run_of_both():
    later = {"megatron_core": "0.20.0"}
    rows = [
        row("23T10:00:00", "ours", 9.0, versions=later),
        row("23T10:00:00", "dense", 9.0, versions=later),
        row("20T10:00:00", "ours", 2.0), row("20T10:00:30", "dense", 4.0),
        row("21T10:00:00", "ours", 3.0), row("21T10:02:00", "dense", 99.0),
        row("22T10:00:00", "ours", 5.0), row("22T10:00:00", "dense", 1.0, gpu="another"),
        row("22T10:00:00", "dense", 1.0, part="forward"), row("22T10:00:00", "dense", None),
    ]  # fmt: skip
    (cell,) = ratios(COMPARISON, LINE, rows).values()
    assert (cell.ratio, cell.ours, cell.date[8:10]) == (0.5, 2.0, "20")


def test_memory_is_of_the_last_run_of_each():
    rows = [
        row("20T10:00:00", "dense", 4.0, metric="peak_mib"),
        row("21T10:00:00", "ours", 9.0, metric="peak_mib"),
        row("22T10:00:00", "ours", 3.0, metric="peak_mib"),
    ]
    memory = replace(COMPARISON, metric="peak_mib", since="2026-11-22", drop_older=True)
    assert ratios(memory, LINE, rows)[4096].ratio == 0.75
    assert ratios(memory, LINE, rows[:2]) == {}


def test_older_and_missing_cells_say_so():
    rows = [
        row(f"{day}T10:00:00", way, value, tokens)
        for day, tokens, ours in ((20, 4096, 1.0), (22, 8192, 14.0))
        for way, value in (("ours", ours), ("dense", 2.0))
    ]
    marked = replace(COMPARISON, since="2026-11-21")
    found = {"one": ratios(marked, LINE, rows), "two": ratios(marked, LINE, rows[2:])}
    assert table(marked, found)[2:] == [
        "| one | 0.50x (1.00) * | 7.00x (14.0) |",
        "| two | not run | 7.00x (14.0) |",
    ]


def test_a_line_that_matches_two_cases_is_refused():
    rows = [row("20T10:00:00", "ours", 1.0), row("20T10:00:00", "ours", 2.0, graph=True)]
    with pytest.raises(ValueError, match="several cases at 4096"):
        ratios(COMPARISON, LINE, rows)
    one = replace(LINE, case={"graph": None}, over="ours", over_case={"graph": True})
    assert ratios(COMPARISON, one, rows)[4096].ratio == 0.5


def test_the_page_has_the_tables_and_claims_of_the_csvs():
    """``python -m benchmarks pages`` writes them anew."""
    assert with_blocks(PAGE, FOLDER) == PAGE
    assert re.findall(r"<!-- comparison: (\w+)", PAGE) == [c.name for c in COMPARISONS]


def test_committed_charts_are_the_ones_that_pages_show():
    pages = [*FOLDER.parent.glob("docs/**/*.md"), FOLDER.parent / "README.md"]
    shown = {
        name for page in pages
        for name in re.findall(r"benchmarks/(\w+\.png)", page.read_text(encoding="utf-8"))
    }  # fmt: skip
    charted = {f"{c.name}.png" for c in COMPARISONS if c.charted}
    assert shown == charted == {file.name for file in FOLDER.glob("*.png")}


def test_every_committed_chart_is_drawn(tmp_path, monkeypatch):
    """On linear axes of ratios, with at most four lines, each named where it ends."""
    charts = pytest.importorskip("benchmarks.charts", reason="needs matplotlib")
    for file in FOLDER.glob("*.csv"):
        shutil.copy(file, tmp_path)
    figures = []
    monkeypatch.setattr(charts.pyplot, "close", figures.append)
    written = charts.draw_all(tmp_path)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)
    for figure, comparison in zip(figures, [c for c in COMPARISONS if c.charted], strict=True):
        (axis,) = figure.axes
        drawn = [line.label for line in comparison.lines if line.drawn]
        assert axis.get_yscale() == "linear" and 2 <= len(drawn) <= 4
        names = {" ".join(text.get_text().split()) for text in axis.texts}
        assert names == {label.replace("`", "") for label in drawn}


@pytest.mark.parametrize("family", appendix.families())
def test_the_appendix_has_every_measurement(family):
    """Figures that left the page are in the appendix; steps of training are means there."""
    text = appendix.page(family)
    rows = [r for r in latest(read_csv(FOLDER / f"{family}.csv")) if not r["part"].isdigit()]
    assert rows
    for found in rows:
        if found["value"] is None:
            reason = " ".join(found["reason"].split()).replace("|", "/")
            assert f"{found['status']}: {reason[:80]}" in text
        else:
            assert f"| {found['value']:.5g}" in text or f"; {found['value']:.5g}" in text


def test_steps_of_a_run_are_shown_as_means():
    steps = {str(n): float(n) for n in range(1, 9)}
    rows = [row("20T10:00:00", "ours", v, metric="lm_loss", part=n) for n, v in steps.items()]
    assert "1.5, 3.5, 5.5, 7.5" in appendix._table(rows)[-1]
