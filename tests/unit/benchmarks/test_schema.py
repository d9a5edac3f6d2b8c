"""The common schema: columns, metrics, round trip, latest results."""

import csv
from pathlib import Path

import pytest

from benchmarks.rows import COLUMNS, METRICS, latest, read_csv
from benchmarks.schema import STATUSES, append_csv, case_fields, long_rows, open_csv
from benchmarks.settings import FAMILIES, load

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
FILES = sorted(FOLDER.glob("**/*.csv"))


def test_every_committed_file_has_the_schema():
    assert {file.stem for file in FILES} == set(FAMILIES)
    assert {file.open().readline().strip() for file in FILES} == {",".join(COLUMNS)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_committed_rows_are_whole(file):
    fields = set(load(file.stem).Case.__dataclass_fields__)
    rows = read_csv(file)
    assert rows and {row["family"] for row in rows} == {file.stem}
    for row in rows:
        assert row["metric"] in METRICS and row["status"] in STATUSES and row["gpu"]
        assert set(row["case"]) <= fields and row["versions"]["torch"]
        assert (row["value"] is None) == (row["status"] != "ok"), row
        assert row["status"] == "ok" or row["reason"]
        if row["p10"] is not None:
            assert row["p10"] <= row["value"] <= row["p90"]
    assert [row for row in latest(rows) if row["status"] == "ok"]


def test_results_become_rows():
    result = {
        "status": "ok", "ms": 2.000004, "p10": 1.0, "p90": 3.0, "repeats": 5, "tflops": 1 / 3,
        "rel_error": None, "ran": "x=y", "lm_loss": 1.23456789,
    }  # fmt: skip
    rows = {row["metric"]: row for row in long_rows("step", result)}
    assert set(rows) == {"ms", "tflops", "lm_loss"}
    assert {row["part"] for row in rows.values()} == {"step"}
    assert {row["ran"] for row in rows.values()} == {"x=y"}
    # The spread is the time's; losses keep all digits.
    assert (rows["ms"]["value"], rows["ms"]["p90"], rows["ms"]["repeats"]) == ("2", "3", 5)
    assert "p10" not in rows["tflops"] and rows["tflops"]["value"] == "0.33333"
    assert rows["lm_loss"]["value"] == "1.23456789"


def test_a_failure_is_a_row_with_a_reason():
    (row,) = long_rows("step", {"status": "failed", "reason": "no memory"})
    assert (row["metric"], row["value"], row["reason"]) == ("ms", None, "no memory")
    # Figures of a wrong result would be misleading.
    wrong = {"status": "failed", "reason": "wrong", "rel_error": 0.5, "ms": 1.0}
    assert [row["value"] for row in long_rows("step", wrong)] == [None]


@pytest.mark.parametrize("result", [{"status": "ok", "speed": 1.0}, {"status": "fine"}])
def test_other_metrics_and_statuses_are_refused(result):
    with pytest.raises(ValueError, match=r"speed|fine"):
        long_rows("step", result)


def row_of(**fields):
    return {
        "date": "1", "gpu": "G", "family": "layer", "case": {"tokens": 8}, "versions": {},
        "way": "ours", "part": "step", "metric": "ms", "value": 1.0, "status": "ok",
    } | fields  # fmt: skip


def test_files_are_appended_to_or_refused(tmp_path):
    path = tmp_path / "rows.csv"
    open_csv(path)
    append_csv(path, [row_of(value="0.5", versions={"torch": "2", "triton": None})])
    open_csv(path)
    append_csv(path, [row_of(status="failed", value=None, reason="a, b")])
    first, second = read_csv(path)
    assert (first["value"], first["versions"]) == (0.5, {"torch": "2"})
    assert first["case"] == {"tokens": 8}
    assert (second["value"], second["reason"]) == (None, "a, b")
    with pytest.raises(ValueError, match="unknown_column"):
        append_csv(path, [{"unknown_column": 1}])
    other = tmp_path / "other.csv"
    other.write_text("preset,speed\n")
    with pytest.raises(SystemExit, match=r"other columns .*speed.*name a new file"):
        open_csv(other)
    assert other.read_text() == "preset,speed\n"
    with pytest.raises(ValueError, match="other columns"):
        read_csv(other)


def test_the_last_run_counts():
    """A failed step must not keep an earlier run's shares; other parts stay."""
    rows = [
        row_of(), row_of(part="step/other", value=0.2), row_of(part="forward"),
        row_of(way="dense"), row_of(gpu="H"),
        row_of(date="2", status="failed", value=None),
    ]  # fmt: skip
    found = [(row["date"], row["gpu"], row["way"], row["part"]) for row in latest(rows)]
    assert found == [
        ("1", "G", "ours", "forward"), ("1", "G", "dense", "step"), ("1", "H", "ours", "step"),
        ("2", "G", "ours", "step"),
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_survive_the_file(family, tmp_path):
    from benchmarks.__main__ import plan_of

    _, plan = plan_of(family, ["--quick"])
    for case, works in plan:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        open_csv(path)
        append_csv(path, [row_of(case=case_fields(case))])
        (row,) = read_csv(path)
        assert type(case)(**row["case"]) == case and works
        with path.open(newline="") as file:
            assert "null" not in next(csv.DictReader(file))["case"]
