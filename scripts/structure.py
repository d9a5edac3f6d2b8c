"""Print the size and the import structure of this package.

    python scripts/structure.py                 # of this clone
    python scripts/structure.py --root OLD      # of another checkout
    python scripts/structure.py --edges         # also every import between two rooms

A room is a file or folder directly in ``megatron_dsa/``, or one of ``INNER``. Levels count the
longest chain of imports; rooms of one cycle share a level. Imports inside functions count, imports
under ``TYPE_CHECKING`` do not.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = "megatron_dsa"
#: Folders in ``ops/`` and ``layers/`` that are separate rooms, since others build on them.
INNER = ("ops/dispatch", "ops/common", "ops/layout", "layers/parallel", "layers/required_ops")
PARTS = {
    "package": ("megatron_dsa", ".py"),
    "tests": ("tests", ".py"),
    "benchmarks": ("benchmarks", ".py"),
    "docs": ("docs", ".md"),
}


def tracked(root: Path, folder: str, suffix: str) -> list[Path]:
    """Return the files that git tracks in ``folder``, or all files without git."""
    command = ["git", "-C", str(root), "ls-files", "--", folder]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        paths = [root / line for line in listed.stdout.splitlines()]
    else:
        paths = list((root / folder).rglob("*"))
    return sorted(path for path in paths if path.suffix == suffix and path.is_file())


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the package that the file ``path`` imports."""
    found = set()
    for node in walk_without_type_checking(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules


def walk_without_type_checking(tree: ast.AST):
    """Yield all nodes of a syntax tree but the bodies of ``if TYPE_CHECKING``."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield from walk_without_type_checking(child)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return module -> imported modules, within the package."""
    files = {module_of(path, root): path for path in tracked(root, PACKAGE, ".py")}
    return {name: imported_modules(path, set(files)) - {name} for name, path in files.items()}


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    inner = "/".join(parts[:2])
    return inner if inner in INNER else parts[0] if parts else "__init__"


def room_graph(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imports in modules.items():
        room = room_of(module)
        graph[room] |= {room_of(each) for each in imports} - {room}
    return dict(graph)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm)."""
    return [sorted(component) for component in components(graph) if len(component) > 1]


def components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components, imported ones before importing ones."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            found.append(set(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the level of every node: 1 + the highest level among its imports."""
    result: dict[str, int] = {}
    for component in components(graph):
        below = set().union(*(graph.get(node, set()) for node in component)) - component
        level = 1 + max((result[node] for node in below), default=0)
        result.update(dict.fromkeys(component, level))
    return result


def print_sizes(root: Path) -> None:
    for name, (folder, suffix) in PARTS.items():
        files = tracked(root, folder, suffix)
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(f"{name}: {len(files)} files, {lines} lines")
    core = [path for path in tracked(root, PACKAGE, ".py") if "extras" not in path.parts]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
    print(f"without extras: {len(core)} files, {lines} lines")
    flat = [path for path in tracked(root, PACKAGE, ".py") if path.parent == root / PACKAGE]
    print(f"flat in {PACKAGE}/: {len(flat)} files")


def print_graph(root: Path, with_edges: bool) -> None:
    modules = import_graph(root)
    graph = room_graph(modules)
    level = levels(graph)
    found = cycles(graph)
    edges = sum(map(len, graph.values()))
    print(
        f"rooms of {PACKAGE}/: {len(graph)}, "
        f"{max(level.values())} levels, {edges} arrows, {len(found)} cycles"
    )
    print(f"imports between modules: {len(cycles(modules))} cycles")
    for cycle in found:
        print(f"  cycle: {', '.join(cycle)}")
    for each in range(1, max(level.values()) + 1):
        print(f"  level {each}: {', '.join(sorted(n for n in level if level[n] == each))}")
    if with_edges:
        for node in sorted(graph, key=lambda n: (level[n], n)):
            print(f"  {node} -> {', '.join(sorted(graph[node]))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--edges", action="store_true", help="print every import between rooms")
    options = parser.parse_args()
    sys.setrecursionlimit(10000)
    print_sizes(options.root.resolve())
    print_graph(options.root.resolve(), options.edges)


if __name__ == "__main__":
    main()
