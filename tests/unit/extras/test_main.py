"""``python -m megatron_dsa`` in a Python that lacks what it needs, and before another command."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run_without(module, *arguments):
    """Run a command in a process in which a module cannot be imported."""
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
    """A part of this package, or of one that is there: installing it again would not help."""
    done = run_without(module, "prepare-data", "--output", str(tmp_path / "data"))
    assert done.returncode == 1 and "Traceback" in done.stderr and module in done.stderr
    assert "does not have" not in done.stderr


def test_who_reads_the_output_may_stop():
    """As ``head`` does."""
    command = [sys.executable, "-m", "megatron_dsa", "info"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        errors = run.stderr.read().decode()
    assert run.returncode == 1 and "BrokenPipeError" not in errors, errors
