"""Each folder of ``extras/`` can be deleted: the rest works, and dependent commands name it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = ROOT / "megatron_dsa/extras"
FOLDERS = sorted(path.name for path in EXTRAS.iterdir() if (path / "__init__.py").is_file())
#: Folder -> a module loaded by its command or flag, and a command of it.
LOADED = {
    "doctor": ("doctor", ["doctor", "--device", "cpu"]),
    "generate": ("generate.generate", ["generate", "--load", ".", "--prompt", "a"]),
    "huggingface": ("huggingface.load_hf", ["flags", "."]),
    "lora": ("lora.lora", None),
    "muon": ("muon.table", ["info", "--muon", "glm-5"]),
    "planner": ("planner.command", None),
    "prepare_data": ("prepare_data.command", ["prepare-data", "--output", "x"]),
    "report": ("report.command", ["report", "x"]),
}
#: Imported by users' scripts only.
IMPORTED = {"rl", "torch_library"}


def test_each_extra_has_a_short_readme_and_is_loaded_or_imported():
    assert set(FOLDERS) == LOADED.keys() | IMPORTED
    pages = {path.parent.name: path for path in EXTRAS.glob("*/README.md")}
    assert pages.keys() >= {*LOADED, "rl"}
    assert all(len(page.read_text("utf-8").splitlines()) <= 15 for page in pages.values())


def imported(path):
    """Yield the modules imported by a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_extra_imports_another(folder):
    for path in (EXTRAS / folder).rglob("*.py"):
        for name in imported(path):
            module = name.removeprefix("megatron_dsa.extras.")
            assert module == name or module.split(".")[0] == folder, f"{path}: {name}"


#: Hides each extra in turn, after importing the core.
PROGRAM = """
import contextlib, io, sys
import megatron_dsa.specs, megatron_dsa.pretrain
from megatron_dsa.config.extras import load_extra
from megatron_dsa.errors import ConfigError

class Hidden:
    folder = None
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(f"megatron_dsa.extras.{self.folder}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = Hidden()
sys.meta_path.insert(0, hidden)
for hidden.folder, (module, command) in LOADED.items():
    for name in [name for name in sys.modules if name.startswith("megatron_dsa.extras")]:
        del sys.modules[name]
    from megatron_dsa.extras import cli
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        cli.main(["--help"])
    assert "prepare-data" in shown.getvalue(), hidden.folder
    for run in (lambda: load_extra(module, "--flag"), lambda: command and cli.main(command)):
        try:
            assert run() is None
        except ConfigError as error:
            folder = f"needs megatron_dsa/extras/{hidden.folder}, which this installation lacks"
            assert folder in str(error), error
        else:
            assert command is None, hidden.folder
"""


def test_each_extra_can_be_deleted_alone():
    environment = os.environ | {"PYTHONPATH": python_path()}
    program = f"LOADED = {LOADED}\n{PROGRAM}"
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, env=environment)
