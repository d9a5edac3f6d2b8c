"""``SMALL=1 examples/conversion/all.sh``: a small dense model becomes sparse, in five ways."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest

from tests.cases.launch_scripts import EXAMPLES
from tests.functional.launch import REPOSITORY

#: Run -> its last step, and its loss on held-out text there (nats per token), as first measured.
MEASURED = {
    "dense": (80, 4.903), "dense_on": (140, 4.646), "warmup": (100, 4.903), "sparse": (140, 4.745),
    "sparse_without_warmup": (140, 4.661), "scratch": (140, 4.707),
}  # fmt: skip
#: Tokens of the corpus then, to train on and held out: Python's library differs between versions.
TOKENS = (1117610, 11659)
#: Other processors and versions of torch round in other places; another corpus is another task.
BAND, BAND_OF_OTHER_TEXT = 0.03, 0.2
#: Run, step of dense_on, and the gap to it: what three seeds gave, and as much on either side.
GAPS = [
    ("sparse", 140, 0.02, 0.14),
    ("sparse", 120, -0.04, 0.09),
    ("sparse_without_warmup", 140, -0.02, 0.04),
    ("scratch", 140, 0.0, 0.12),
]


def train_all(folder):
    """Run the example as users do; return what it printed."""
    places = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHON": sys.executable, "RUN_DIR": str(folder), "SMALL": "1", "SEED": "1"}
    unset = ("STEPS", "TOPK", "ONLY", "GPU30", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [EXAMPLES / "conversion/all.sh"],
        env=environment | {"PYTHONPATH": places, "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """Train all runs once; return their folder and what was printed."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("conversion")
    return folder, train_all(folder)


@pytest.fixture(scope="module")
def losses(conversion):
    """Held-out losses by run and step."""
    found = {}
    with open(conversion[0] / "validation.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert int(row["tokens"]) == int(row["step"]) * 4 * 512
            found.setdefault(row["run"], {})[int(row["step"])] = float(row["validation_loss"])
    assert list(found) == list(MEASURED)
    return found


def logged(conversion, run, figure):
    """Return a figure of all log lines of a run."""
    log = (conversion[0] / run / "train.log").read_text(encoding="utf-8")
    return [float(value) for value in re.findall(rf"\b{figure}: (\S+)", log)]


def test_losses_are_within_their_bands(conversion, losses):
    facts = json.loads((conversion[0] / "data/corpus.json").read_text(encoding="utf-8"))
    same_text = (facts["train"]["tokens"], facts["held_out"]["tokens"]) == TOKENS
    band = BAND if same_text else BAND_OF_OTHER_TEXT
    for run, (step, loss) in MEASURED.items():
        assert max(losses[run]) == step
        assert losses[run][step] == pytest.approx(loss, abs=band), run


def test_the_gap_to_the_dense_model_that_goes_on(losses):
    """At equal tokens, and after a warm-up at equal updates, too."""
    for run, step, least, most in GAPS:
        gap = losses[run][140] - losses["dense_on"][step]
        assert least < gap < most, (run, step, gap)


def test_a_warm_up_trains_the_indexers_alone(conversion, losses):
    assert losses["warmup"] == {100: pytest.approx(losses["dense"][80], abs=1e-5)}
    indexer = logged(conversion, "warmup", "indexer loss")
    assert indexer[-1] < 0.7 * indexer[0]


def test_after_a_warm_up_the_selected_keys_hold_more_attention(conversion):
    """In the first step; without one the indexers are random."""
    first = {
        run: logged(conversion, run, "dsa attention mass captured")[0]
        for run in ("sparse", "sparse_without_warmup")
    }
    assert first["sparse"] > first["sparse_without_warmup"] + 0.005


def test_a_table_ends_the_run(conversion):
    rows = conversion[1].splitlines()[-7:]
    assert [re.match(r"\| (\w+) \| (\d+) ", row).groups() for row in rows] == [
        ("dense", "80"),
        ("dense_on", "140"),
        ("warmup", "100"),
        ("sparse", "140"),
        ("sparse", "140"),
        ("sparse_without_warmup", "140"),
        ("scratch", "140"),
    ]


def test_nothing_is_trained_twice(conversion):
    again = train_all(conversion[0])
    for run, (step, _) in MEASURED.items():
        assert f"== {run} is at step {step}\n" in again
    assert "iteration" not in again and again.endswith(
        "\n".join(conversion[1].splitlines()[-9:]) + "\n"
    )
