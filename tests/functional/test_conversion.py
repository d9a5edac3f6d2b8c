"""``SMALL=1 examples/conversion/all.sh``: a small dense model made sparse in five ways."""

import csv
import json
import os
import re
import subprocess

import pytest

from tests.cases.launch_scripts import EXAMPLES
from tests.processes import python_path

#: Run -> last step and its held-out loss (nats per token), as first measured.
MEASURED = {
    "dense": (60, 5.372), "dense_on": (120, 4.962), "warmup": (80, 5.372), "sparse": (120, 5.074),
    "sparse_without_warmup": (120, 4.981), "scratch": (120, 5.003),
}  # fmt: skip
#: Corpus tokens then, trained and held out: Python's library varies.
TOKENS = (1117610, 11659)
#: Other processors round differently (AVX2: 0.0013); another corpus is another task.
BAND, BAND_OF_OTHER_TEXT = 0.02, 0.2
#: Run, and bounds of its gap to dense_on from three seeds.
GAPS = [("sparse", 0.07, 0.2), ("sparse_without_warmup", 0.0, 0.035), ("scratch", 0.0, 0.3)]


def train_all(folder, python):
    """Run the example like a user; return its output."""
    variables = {"PYTHON": python, "RUN_DIR": str(folder), "SMALL": "1", "SEED": "1"}
    unset = ("STEPS", "BATCH", "RATE", "LENGTH", "TOPK", "ONLY", "PLAN", "GPU30")
    unset += ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [EXAMPLES / "conversion/all.sh"],
        env=environment | {"PYTHONPATH": python_path(), "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def conversion(tmp_path_factory, python):
    """Train all runs once; return folder and output."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("conversion")
    return folder, train_all(folder, python)


@pytest.fixture(scope="module")
def losses(conversion):
    found = {}
    with open(conversion[0] / "validation.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert int(row["tokens"]) == int(row["step"]) * 2 * 512
            found.setdefault(row["run"], {})[int(row["step"])] = float(row["validation_loss"])
    assert list(found) == list(MEASURED)
    return found


def logged(conversion, run, figure):
    log = (conversion[0] / run / "train.log").read_text(encoding="utf-8")
    return [float(value) for value in re.findall(rf"\b{figure}: (\S+)", log)]


def same_text(conversion):
    """Return whether the corpus is the measured one."""
    facts = json.loads((conversion[0] / "data/corpus.json").read_text(encoding="utf-8"))
    return (facts["train"]["tokens"], facts["held_out"]["tokens"]) == TOKENS


def test_losses_are_within_their_bands(conversion, losses):
    band = BAND if same_text(conversion) else BAND_OF_OTHER_TEXT
    for run, (step, loss) in MEASURED.items():
        assert max(losses[run]) == step
        assert losses[run][step] == pytest.approx(loss, abs=band), run


def test_the_gap_to_the_dense_model_that_goes_on(losses):
    for run, least, most in GAPS:
        gap = losses[run][120] - losses["dense_on"][120]
        assert least < gap < most, (run, gap)


def test_a_warm_up_trains_the_indexers_alone(conversion, losses):
    assert losses["warmup"] == {80: pytest.approx(losses["dense"][60], abs=1e-5)}
    indexer = logged(conversion, "warmup", "indexer loss")
    assert indexer[-1] < 0.7 * indexer[0]


def test_after_a_warm_up_the_selected_keys_hold_more_attention(conversion):
    first = {
        run: logged(conversion, run, "dsa attention mass captured")[0]
        for run in ("sparse", "sparse_without_warmup")
    }
    assert first["sparse"] > first["sparse_without_warmup"] + 0.005


def measured(conversion, run):
    """Return values by step, measure and part."""
    with open(conversion[0] / run / "measures.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {(int(row["step"]), row["measure"], row["part"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows)  # no duplicates
    return found


@pytest.mark.parametrize("run", MEASURED)
def test_measured_losses_are_those_of_megatron(conversion, losses, run):
    found = measured(conversion, run)
    mine = {step: loss for (step, _, part), loss in found.items() if part == "all"}
    assert mine == pytest.approx(losses[run], abs=2e-5)
    assert len(losses[run]) >= (1 if run == "warmup" else 2)
    tokens, sums = {}, {}
    with open(conversion[0] / run / "documents.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = int(row["step"]), row["band"]
            tokens[key] = tokens.get(key, 0) + int(row["tokens"])
            sums[key] = sums.get(key, 0.0) + float(row["loss_sum"])
    sequences = tokens[max(losses[run]), "0-64"] // 64
    assert sequences == TOKENS[1] // 512 or not same_text(conversion)
    for step in losses[run]:
        for band, share in {"0-64": 64, "64-256": 192, "256-512": 256}.items():
            assert tokens[step, band] == share * sequences
            mean = sums[step, band] / tokens[step, band]
            assert mean == pytest.approx(found[step, "loss", band], rel=1e-9)
        total = sum(sums[step, band] for band in ("0-64", "64-256", "256-512"))
        assert total / (512 * sequences) == pytest.approx(mine[step], rel=1e-9)


def test_what_else_is_measured(conversion):
    for run in MEASURED:
        found = measured(conversion, run)
        last = max(step for step, _, _ in found)
        names = {name for step, name, _ in found if step == last}
        expected = {"loss", "copy", "look-up"}
        if not run.startswith("dense"):
            expected.add("indexer KL")
        if run not in ("dense", "dense_on", "warmup"):
            expected |= {"mass", "best mass", "recall"}
        assert names == expected, run
        for layer in ("layer 1", "layer 2") if "mass" in names else ():
            assert 0.125 < found[last, "mass", layer] <= found[last, "best mass", layer] < 0.7
            assert 0.3 < found[last, "recall", layer] < 0.9
    for name in ("measures", "documents", "validation"):
        assert (conversion[0] / f"{name}.csv").is_file()


def test_a_table_ends_the_run(conversion):
    rows = conversion[1].splitlines()[-7:]
    assert [re.match(r"\| (\w+) \| (\d+) ", row).groups() for row in rows] == [
        ("dense", "60"),
        ("dense_on", "120"),
        ("warmup", "80"),
        ("sparse", "120"),
        ("sparse", "120"),
        ("sparse_without_warmup", "120"),
        ("scratch", "120"),
    ]


def test_nothing_is_trained_twice(conversion, python):
    again = train_all(conversion[0], python)
    assert again.startswith("== dense: done, step 60\n") and "== about 0 minutes left\n" in again
    for run, (step, _) in MEASURED.items():
        assert f"== {run} is at step {step}\n" in again
    assert "iteration" not in again and again.endswith(
        "\n".join(conversion[1].splitlines()[-9:]) + "\n"
    )
