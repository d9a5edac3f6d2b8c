"""The import structure: levels, no cycles, late imports, shared parts of tests."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.launch import TINY, command_line

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dsa"
TESTS = ROOT / "tests"

#: Folders of the package, the lowest first. Imports go down only.
LEVELS = (
    {"__init__", "errors"},
    {"versions"},
    {"ops/dispatch", "patches"},
    {"ops/common"},
    {"ops/layout"},
    {"ops"},
    {"config", "testing"},
    {"arguments", "layers/parallel", "layers/required_ops"},
    {"dsa_kernels", "metrics"},
    {"layers"},
    {"dsa"},
    {"csa"},
    {"specs"},
    {"training"},
    {"extras", "pretrain"},
    {"__main__"},
)

#: Imports inside functions, by file, with their reason.
LATE = {
    # Triton, TileLang, safetensors and matplotlib are optional.
    "ops/dense_attention/ring/combine.py": "Triton",
    "ops/common/scaling.py": "Triton",
    "ops/common/tokens.py": "Triton",
    "ops/hopper/sums.py": "Triton",
    "ops/indexer_loss/sample.py": "Triton",
    "ops/indexer_loss/tilelang/launch.py": "TileLang",
    "ops/indexer_topk/fp8.py": "Triton",
    "ops/indexer_topk/torch.py": "Triton",
    "ops/indexer_topk/tilelang/launch.py": "TileLang",
    "ops/sparse_attention/tilelang/launch.py": "TileLang",
    "extras/report/command.py": "matplotlib",
    # Without a GPU, Megatron is prepared before anything imports it.
    "pretrain.py": "the host is prepared",
    "extras/cli.py": "the host is prepared",
    "config/presets.py": "flags are printed without torch",
    "__main__.py": "torch is found missing",
}


def script(name: str):
    """Import a file of ``scripts/``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def structure():
    return script("structure")


def test_planted_errors_fit_the_code():
    """Otherwise scripts/planted_errors.py would plant nothing."""
    for error in script("planted_errors").ERRORS:
        assert (PACKAGE / error.file).read_text().count(error.right) == 1, error.what
        assert all((ROOT / "tests" / path.split("::")[0]).exists() for path in error.tests.split())


def test_imports_go_down_only(structure):
    level = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
    graph = structure.room_graph(structure.import_graph(ROOT))
    assert set(graph) == set(level)
    upward = [
        f"{room} imports {other}"
        for room, others in graph.items()
        for other in others
        if level[other] >= level[room]
    ]
    assert not upward


def test_no_module_is_in_a_cycle(structure):
    assert structure.cycles(structure.import_graph(ROOT)) == []


def test_cycles_are_found(structure):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert structure.cycles(graph) == [["a", "b", "c"]]
    assert structure.levels(graph) == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1}


def late_imports(path: Path) -> list[str]:
    found = []
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_dsa"):
                found.append(node.module)
    return found


def test_imports_stand_at_the_top():
    late = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if late_imports(path)}
    assert late == set(LATE)


def test_folders_of_operations_import_nothing():
    """A file ``torch.py`` would shadow torch in an ``__init__.py`` that imports it."""
    for path in PACKAGE.glob("ops/*/__init__.py"):
        if not path.with_name("torch.py").exists():
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert all(isinstance(node, ast.Expr) for node in body), path


def test_few_files_lie_flat():
    assert len(list(PACKAGE.glob("*.py"))) <= 10


#: Hides the modules ``HIDDEN`` and all below them.
HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in HIDDEN):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run_hiding(program: str, *hidden: str) -> None:
    program = f"HIDDEN = {hidden}\n{HIDING}\n{program}"
    launcher = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, env=os.environ | launcher)


@pytest.mark.parametrize("part", ["ops", "testing"])
def test_operations_import_neither_megatron_nor_layers(part):
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((PACKAGE / part).rglob("*.py"))
        # Kernels in the syntax of TileLang and Triton import these packages.
        if not {"tilelang", "triton"} & set(path.parts) and "triton" not in path.stem
    ]
    assert len(names) > 5
    run_hiding(
        f"import importlib\nfor name in {names}: importlib.import_module(name)",
        "megatron", "megatron_dsa.layers", "megatron_dsa.config", "megatron_dsa.extras",
    )  # fmt: skip


def test_the_core_trains_without_extras():
    program = f"""
sys.argv[1:] = {command_line(TINY | {"--mock-data": True})}
from megatron_dsa.pretrain import main
main()
assert not any(name.startswith("megatron_dsa.extras.") for name in sys.modules)
"""
    run_hiding(program, "megatron_dsa.extras")


def named_test_modules(source: str, tests: set[str]) -> list[str]:
    """Return the test modules that a source imports or names in strings outside of docstrings."""
    tree, names = ast.parse(source), []
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            names += re.findall(r"[\w./]*[./]test_\w+", node.value)
    return [name for name in names if tests & set(re.split(r"[./]", name))]


def test_no_file_imports_a_test_module():
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    assert len(tests) > 80
    found = {
        str(path.relative_to(TESTS)): named
        for path in TESTS.rglob("*.py")
        if path != TESTS / "tiers.py"
        and (named := named_test_modules(path.read_text(encoding="utf-8"), tests))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("from tests.unit.ops.test_it import check", ["tests.unit.ops.test_it.check"]),
        ("from tests.unit.ops import test_it", ["tests.unit.ops.test_it"]),
        ("from . import test_it", [".test_it"]),
        ("from .test_it import check", ["test_it.check"]),
        ("def f():\n    import tests.unit.test_it as it", ["tests.unit.test_it"]),
        ("import_module('tests.unit.test_it')", ["tests.unit.test_it"]),
        ("import_module('.test_it', 'tests.unit')", [".test_it"]),
        ("spec_from_file_location('it', f'{root}/unit/test_it.py')", ["/unit/test_it"]),
        ("'Like tests/unit/test_it.py.'\nfrom tests.cases.it import test_other", []),
    ],
)
def test_imports_of_test_modules_are_found(source, named):
    assert named_test_modules(source, {"test_it"}) == named
