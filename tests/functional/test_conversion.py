"""``examples/conversion/all.sh``: a dense model goes on, and becomes sparse in three ways."""

import csv
import os
import subprocess
import sys

import pytest

from tests.cases.launch_scripts import EXAMPLES
from tests.functional.launch import REPOSITORY

#: Run -> its last step, and its loss on held-out text there (nats per token), as first measured.
MEASURED = {
    "dense": (40, 5.760), "dense_on": (64, 5.421), "warmup": (48, 5.760), "sparse": (64, 5.597),
    "sparse_without_warmup": (64, 5.466), "scratch": (40, 5.950), "scratch_on": (64, 5.680),
}  # fmt: skip
#: Other processors and versions of torch round in other places.
BAND = 0.03


def test_a_dense_model_becomes_sparse(tmp_path):
    pytest.importorskip("tokenizers")
    places = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHON": sys.executable, "RUN_DIR": str(tmp_path), "SMALL": "1"}
    done = subprocess.run(
        [EXAMPLES / "conversion" / "all.sh"],
        env=os.environ | {"PYTHONPATH": places, "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    with open(tmp_path / "validation.csv", encoding="utf-8") as file:
        rows = [(row["run"], int(row["step"]), row) for row in csv.DictReader(file)]
    found = {(run, step): float(row["validation_loss"]) for run, step, row in rows}
    last = {run: (step, found[run, step]) for run, step, _ in sorted(rows, key=lambda x: x[1])}
    assert {run: step for run, (step, _) in last.items()} == {
        run: step for run, (step, _) in MEASURED.items()
    }  # fmt: skip
    for run, (step, loss) in MEASURED.items():
        assert last[run] == (step, pytest.approx(loss, abs=BAND)), run
    # The model is frozen in the warm-up.
    assert found["warmup", 48] == pytest.approx(found["dense", 40], abs=1e-5)
    assert {int(row["tokens"]) for run, step, row in rows if step == 64} == {64 * 4 * 512}
    gap = last["sparse_without_warmup"][1] - last["dense_on"][1]
    assert f"| sparse_without_warmup | {last['sparse_without_warmup'][1]:.4f} | {gap:+.4f} (" in (
        done.stdout
    )
    again = subprocess.run(
        [EXAMPLES / "conversion" / "all.sh"],
        env=os.environ | {"PYTHONPATH": places, "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0 and "== scratch_on is at step 64" in again.stdout
    assert "iteration" not in again.stdout  # nothing is trained twice
