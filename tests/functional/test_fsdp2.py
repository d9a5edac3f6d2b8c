"""``examples/fsdp2_dsa.py``: FSDP2 on two ranks, compared with the package's Megatron path."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.functional.fsdp2_reference import (
    BATCH,
    COEFFICIENT,
    EPS,
    LEARNING_RATE,
    LENGTH,
    STEPS,
)
from tests.functional.launch import REPOSITORY
from tests.processes import python_path

load_file = pytest.importorskip("safetensors.torch").load_file


def run(*command: str, device: str = "cpu") -> str:
    """Run a Python command of this repository; it must succeed."""
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=REPOSITORY, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


#: gloo on the CPU, NCCL on a GPU per rank.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
        ],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def reference(tmp_path_factory, device):
    """Return the folder of Megatron's results: checkpoint, gradients and losses."""
    folder = tmp_path_factory.mktemp("reference")
    run("-m", "tests.functional.fsdp2_reference", str(folder), device=device)
    return folder


@pytest.mark.parametrize("more", [(), ("--compile", "aot_eager")], ids=["eager", "compiled"])
def test_losses_are_those_of_megatron(reference, tmp_path, more, device):
    """Measured: 1.3e-7 (language model) and 1.3e-6 (indexer), relative."""
    flags = {
        "--load": reference / "hf", "--steps": STEPS, "--batch": BATCH, "--length": LENGTH,
        "--lr": LEARNING_RATE, "--eps": EPS, "--indexer-loss-coeff": COEFFICIENT,
        "--losses": tmp_path / "losses.json",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    log = run(*RANKS, "examples/fsdp2_dsa.py", *words, *more, device=device)
    assert f"step {STEPS} | lm loss" in log
    ours = json.loads((tmp_path / "losses.json").read_text())
    theirs = json.loads((reference / "megatron.json").read_text())
    assert len(ours) == len(theirs) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one["lm loss"] == pytest.approx(other["lm loss"], rel=2e-6)
        assert one["indexer loss"] == pytest.approx(other["indexer loss"], rel=2e-5)
    assert ours[-1]["lm loss"] < 0.7 * ours[0]["lm loss"]
    assert ours[-1]["indexer loss"] < 0.7 * ours[0]["indexer loss"]


def test_gradients_are_those_of_megatron(reference, device):
    module = "tests.functional.fsdp2_reference"
    run(*RANKS, "-m", module, str(reference), "example", device=device)
    ours = torch.load(reference / "fsdp2.pt")
    (shard,) = (reference / "gradients").glob("*.safetensors")
    theirs = load_file(shard)
    assert set(ours) == set(theirs)
    errors = {k: float((x - theirs[k]).norm() / theirs[k].norm()) for k, x in ours.items()}
    print(f"largest relative error of a gradient: {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-5, errors
