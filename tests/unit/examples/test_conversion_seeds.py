"""``examples/conversion``: tables and charts of several seeds and sessions."""

import csv
from statistics import fmean

import pytest

from tests.cases.conversion import module

SETTINGS = "seed {}, steps 20 10 20, first TOPK 64, --num-layers 2, batch 2\n"


def session(folder, seed, **losses):
    """Write ``results.sh``'s output: by run, losses of documents of 100 and 300 tokens."""
    folder.mkdir()
    (folder / "settings.txt").write_text(SETTINGS.format(seed))
    with open(folder / "documents.csv", "w") as file:
        file.write("run,step,document,band,loss_sum,tokens\n")
        for run, (step, first, second) in losses.items():
            file.write(
                f"{run},{step},0,0-8,{first * 100},100\n{run},{step},1,0-8,{second * 300},300\n"
            )
    return folder


def rows_of(seeds, capsys, monkeypatch, output, *folders):
    monkeypatch.setattr("sys.argv", ["seeds", str(output), *map(str, folders)])
    seeds.main()
    cells = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    return {(row[0], row[2]): row[3:] for row in cells}


def test_gaps_over_seeds(tmp_path, monkeypatch, capsys):
    seeds = module("seeds")
    folders = [
        session(tmp_path / "a", 1, dense_on=(50, 2.0, 2.0), sparse=(50, 2.3, 2.1)),
        session(tmp_path / "b", 1, dense_on=(50, 2.0, 2.0), sparse=(50, 2.5, 2.1),
                sparse_fp8=(50, 2.5, 2.0)),
        session(tmp_path / "c", 2, dense_on=(50, 3.0, 3.0), sparse=(50, 2.9, 2.9),
                scratch=(50, float("nan"), 3.0)),
        session(tmp_path / "d", 2, sparse_32=(50, 3.3, 3.3)),
    ]  # fmt: skip
    found = rows_of(seeds, capsys, monkeypatch, tmp_path / "all", *folders)
    # Seed 1: (0.4 * 100 + 0.1 * 300) / 400 = 0.175; seed 2: -0.1. Documents: +0.15 and 0.
    mean, over_seeds = (0.175 - 0.1) / 2, 0.275 / 2
    over_documents = ((15 - 3.75) ** 2 + 11.25**2) ** 0.5 * 2**0.5 / 400
    number, gap, *errors = found["sparse", "dense_on, 50"]
    assert (number, gap) == ("2", f"{mean:+.4f} ({mean / 2.5:+.2%})")
    assert [float(x) for x in errors] == pytest.approx([over_documents, over_seeds], abs=6e-5)
    assert found["sparse_fp8", "sparse, 50"][:2] == ["1", "-0.0750 (-3.41%)"]
    assert found["scratch", "dense_on, 50"][1] == "+nan (+nan%)"
    # The dense model of another session of its seed.
    assert found["sparse_32", "dense_on, 50"][:2] == ["1", "+0.3000 (+10.00%)"]
    assert found["sparse", "dense_on, 40"] == ["0", "not measured"]
    # Fewer keys are also compared with more.
    assert found["sparse_32", "sparse, 50"][:2] == ["1", "+0.4000 (+13.79%)"]
    with open(tmp_path / "all/documents.csv", newline="") as file:
        written = [(row["seed"], row["run"]) for row in csv.DictReader(file)]
    assert written.count(("1", "sparse")) == 2 and written.count(("1", "sparse_fp8")) == 2


def test_what_was_put_together_is_read_again(tmp_path, monkeypatch, capsys):
    seeds = module("seeds")
    folders = [
        session(tmp_path / "a", 1, dense=(30, 4.0, 4.0), dense_on=(50, 2.0, 2.0),
                sparse=(50, 2.3, 2.1)),
        session(tmp_path / "b", 2, dense_on=(50, 3.0, 3.0), sparse=(50, 2.9, 2.9)),
    ]  # fmt: skip
    first = rows_of(seeds, capsys, monkeypatch, tmp_path / "all", *folders)
    assert ("dense", "dense_on, 30") not in first
    again = rows_of(seeds, capsys, monkeypatch, tmp_path / "again", tmp_path / "all")
    assert again == first
    for name in ("documents.csv", "settings.txt"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "all" / name).read_text()
    other = session(tmp_path / "c", 3, dense_on=(50, 3.0, 3.0), sparse=(50, 3.3, 3.3))
    found = rows_of(seeds, capsys, monkeypatch, tmp_path / "more", tmp_path / "all", other)
    assert found["sparse", "dense_on, 50"][0] == "3"


def test_sessions_that_do_not_compare_are_refused(tmp_path, monkeypatch, capsys):
    seeds = module("seeds")
    one = session(tmp_path / "a", 1, dense_on=(50, 2.0, 2.0), sparse=(50, 2.3, 2.1))
    other = session(tmp_path / "b", 2, dense_on=(50, 2.0, 2.0))
    (other / "settings.txt").write_text(SETTINGS.format(2).replace("20 10 20", "20 10 30"))
    with pytest.raises(SystemExit, match="other settings have no common gap"):
        rows_of(seeds, capsys, monkeypatch, tmp_path / "all", one, other)
    (other / "settings.txt").unlink()
    with pytest.raises(SystemExit, match="must say seed and steps"):
        rows_of(seeds, capsys, monkeypatch, tmp_path / "all", other)


def test_charts_of_several_seeds(tmp_path):
    pytest.importorskip("matplotlib")
    charts = module("charts")
    row = {"run": "sparse", "step": "50", "measure": "copy", "part": "8", "error": "0.5"}
    rows = [row | {"seed": seed, "value": value} for seed, value in (("1", "0.1"), ("2", "0.3"))]
    for own, expected in (("0.5", 0.5), ("0.05", 0.1), ("", 0.1)):
        (found,) = charts.means([each | {"error": own} for each in rows])
        assert float(found["value"]) == pytest.approx(0.2)
        assert float(found["error"]) == pytest.approx(expected)
    (found,) = charts.means(rows[:1])
    assert (float(found["value"]), float(found["error"])) == (0.1, 0.5)
    sums = {
        seed: {
            "dense_on": {50: {(0, "0-8"): (20.0, 10), (1, "0-8"): (20.0, 10)}},
            "sparse": {50: {(0, "0-8"): (20.0 + gap, 10), (1, "0-8"): (20.0 + gap, 10)}},
        }
        for seed, gap in (("1", -2.0), ("2", 4.0))
    }
    assert charts.last_gaps(sums)["sparse"]["0-8"] == pytest.approx((0.1, 0.3))
    # Documents differ more than seeds, which cut them into other bands.
    sums["1"]["sparse"][50] = {(0, "0-8"): (28.0, 10), (1, "0-8"): (8.0, 10)}
    sums["2"] = {
        "dense_on": {50: {(0, "0-8"): (40.0, 20), (2, "0-8"): (20.0, 10)}},
        "sparse": {50: {(0, "0-8"): (46.0, 20), (2, "0-8"): (17.0, 10)}},
    }
    # Sums of both over tokens of both: (8 + 6) / 30, -12 / 10, -3 / 10.
    value = fmean([-4 / 20, 3 / 30])
    total = (14 - 12 - 3) / 50
    apart = (14 - 30 * total, -12 - 10 * total, -3 - 10 * total)
    error = (sum(each**2 for each in apart) * 3 / 2) ** 0.5 / 50
    assert charts.last_gaps(sums)["sparse"]["0-8"] == pytest.approx((value, error))
    columns = {"step": "50", "tokens": "100", "validation_loss": "2"}
    validation = [columns | {"seed": s, "run": r} for s in "12" for r in ("dense_on", "sparse")]
    assert charts.draw_losses(validation, sums, tmp_path / "losses.png").is_file()
    assert charts.draw_positions(sums, tmp_path / "positions.png").is_file()
