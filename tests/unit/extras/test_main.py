"""``python -m megatron_dsa`` with missing packages, and before another command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.released_models import CONFIGS

ROOT = Path(__file__).resolve().parents[3]


def run_without(module, *arguments):
    """Run a command in a process without a module."""
    program = (
        "import runpy, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "runpy.run_module('megatron_dsa', run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "command", "package"),
    [
        ("torch", ("info",), "torch"),
        ("megatron", ("prepare-data", "--output", "unwritten"), "megatron-core"),
        ("megatron.core", ("prepare-data", "--output", "unwritten"), "megatron-core"),
    ],
)
def test_missing_package_is_named_with_what_to_do(module, command, package):
    done = run_without(module, *command)
    assert done.returncode == 1 and not done.stdout
    assert f"needs {package}, which {sys.executable} does not have" in done.stderr
    assert "source .venv/bin/activate" in done.stderr and "pip install -e '.[train]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "module", ["megatron_dsa.training.data", "megatron.core.datasets.indexed_dataset"]
)
def test_what_else_is_missing_keeps_its_traceback(module, tmp_path):
    """Reinstalling would not help with a missing part of an installed package."""
    done = run_without(module, "prepare-data", "--output", str(tmp_path / "data"))
    assert done.returncode == 1 and "Traceback" in done.stderr and module in done.stderr
    assert "does not have" not in done.stderr


def test_who_reads_the_output_may_stop():
    command = [sys.executable, "-m", "megatron_dsa", "info"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        errors = run.stderr.read().decode()
    assert run.returncode == 1 and "BrokenPipeError" not in errors, errors


#: Command -> modules that it does not import, exit code, part of its output.
LIGHT = {
    "megatron_dsa --version": ("torch", 0, "megatron_dsa "),
    "megatron_dsa --help": ("torch", 0, "prepare-data"),
    "megatron_dsa flagz": ("torch", 2, "did you mean flags?"),
    "megatron_dsa info --jsn": ("torch", 2, "did you mean --json?"),
    "megatron_dsa flags v3.2": ("torch", 0, "--num-layers 61"),
    "megatron_dsa flags v32": ("torch", 2, "did you mean v3.2?"),
    "megatron_dsa import-hf --input none --output none": ("torch", 2, "none does not exist"),
    "megatron_dsa generate --load none --prompt a": ("torch", 2, "--load none does not exist"),
    "megatron_dsa info": ("megatron", 0, ""),
    "megatron_dsa info --muon v3": ("megatron", 2, "did you mean v3.2?"),
    "megatron_dsa flags {config}": ("megatron", 0, "--num-layers 61"),
    "megatron_dsa.pretrain --dsa-stge dense": ("megatron", 2, "did you mean --dsa-stage?"),
    "megatron_dsa.pretrain --dsa-stage spars": ("megatron", 2, "did you mean sparse?"),
    "megatron_dsa.pretrain --dsa-workspace-mib 0": ("megatron", 2, "must be finite and at least 1"),
    "megatron_dsa.pretrain --lr=-1": ("megatron", 2, "--lr must be finite and at least 0"),
}


@pytest.mark.parametrize("command", LIGHT)
def test_commands_import_no_more_than_they_need(command, tmp_path):
    """torch takes two seconds, Megatron five more."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["v3.2"]))
    avoided, code, said = LIGHT[command]
    words = [word.format(config=tmp_path) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr[-500:]
    found = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M)
    assert "argparse" in found
    assert not [name for name in found if name.partition(".")[0] == avoided]


def test_unknown_flags_of_megatron_get_a_suggestion():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dsa.pretrain", "--tensor-model-paralel-size", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "did you mean --tensor-model-parallel-size?" in done.stderr
