"""The commands of the README and ``docs/`` work; links, files and names in the pages exist.

All ``bash`` and ``python`` blocks of a page run in order, in one shell, in an empty folder. A
comment before a block changes that:

* ``<!-- not run: REASON -->``: its modules, scripts, flags, extras and names must exist;
* ``<!-- save as: FILE -->``: write a Python block to a file for later commands.
"""

import argparse
import ast
import functools
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dsa.extras import cli
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FOLDERS = ("megatron_dsa", "docs", "tests", "benchmarks", "examples", "scripts", ".ci", ".github")
FILES = [
    *(path for path in ROOT.iterdir() if path.is_file()),
    *(path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()),
]
MARKDOWN = [path for path in FILES if path.suffix == ".md"]
SOURCES = [path for path in FILES if path.suffix in (".py", ".sh", ".sbatch", ".yml", ".yaml")]
#: Other projects' files in pages.
FOREIGN = {"pretrain_gpt.py"}
FENCE = re.compile(
    r"^(?:<!-- (?P<what>not run|save as): (?P<value>[^\n]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``what`` and ``value`` are the preceding comment's."""

    where: str
    language: str
    text: str
    what: str | None
    value: str | None

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and self.what != "not run"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, m.start('text'))}", **parts)
        for m in FENCE.finditer(text)
        if (parts := m.groupdict())
    ]


ALL = [block for page in PAGES for block in blocks(page)]
NOT_RUN = [block for block in ALL if block.what == "not run"]


def test_every_block_says_what_it_is():
    """A block without a language would be neither run nor checked."""
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * len(ALL)
    for block in ALL:
        assert block.language in ("bash", "python", "text"), block.where


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", without_blocks(page), re.M)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in titles)


@pytest.mark.parametrize("page", MARKDOWN, ids=relative)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", without_blocks(page)):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_files_exist(page):
    paths = [f"/{relative(path)}" for path in FILES]
    pattern = r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|sbatch|csv|png|svg|md))`"
    for name in set(re.findall(pattern, without_blocks(page))) - FOREIGN:
        assert any(path.endswith(f"/{name}") for path in paths), name


def test_pages_that_the_code_names_exist():
    for file in SOURCES:
        for name in re.findall(r"docs/[\w/]+\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{relative(file)}: {name}"


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in set(PAGES[2:]) - {DOCS / "README.md"}:
        assert f"({page.relative_to(DOCS).as_posix()})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_sentences_are_plain(page):
    text = without_blocks(page)
    for pattern in (r"\bOf\b", r"\b[Nn]obody\b", r"\b[Ww]hoever\b", r"\b[Tt]hose of\b"):
        found = re.search(rf".*{pattern}.*", text)
        assert not found, found[0]


def test_the_api_reference_has_all_that_is_public(tmp_path):
    from scripts import api_reference

    output = tmp_path / "build" / "api.md"
    api_reference.main([str(output)])
    sections = dict(
        re.findall(
            r"^## megatron_dsa\.([\w.]+)\n(.*?)(?=^## |\Z)",
            output.read_text(encoding="utf-8"),
            re.M | re.S,
        )
    )
    architecture = (DOCS / "design" / "architecture.md").read_text(encoding="utf-8")
    table = architecture.split("## Public modules")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `megatron_dsa\.([\w.]+)` \| (.*) \|$", table, re.M)
    assert sorted(module for module, _ in rows) == sorted(sections)
    for module, words in rows:
        documented = set(re.findall(r"^### (\w+)$", sections[module], re.M))
        wanted = set(re.findall(r"`(\w+)`", words))
        found = importlib.import_module(f"megatron_dsa.{module}")
        wanted |= {value.__name__ for value in api_reference.public(found)}
        assert wanted and wanted <= documented, wanted - documented


def names(block):
    return f"{block.where} ({block.value})"


@pytest.mark.parametrize("block", NOT_RUN, ids=names)
def test_what_is_not_run_exists(block):
    if block.language == "python":
        check_python(block.text)
        return
    commands = [line for line in logical_lines(block.text) if line]
    assert commands, block.where
    for words in commands:
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, tmp_path):
    todo = [block for block in blocks(page) if block.runs]
    if not any(block.what is None for block in todo):
        pytest.skip("nothing to run")
    script = ["set -euo pipefail"]
    for number, block in enumerate(todo):
        if block.language == "bash":
            script += [f"echo '== {block.where}'", block.text]
            continue
        file = block.value or f"block_{number}.py"
        (tmp_path / file).write_text(block.text, encoding="utf-8")
        if block.what is None:
            script.append(f"echo '== {block.where}'; python {file}")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": python_path(),
            "PYTHONWARNINGS": "ignore",
            "PET_STANDALONE": "1",  # torchrun takes a free port
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    check_counts(todo, done.stdout)


def check_counts(todo: list[Block], printed: str) -> None:
    """Raise unless every training run of these blocks ended with a count of calls."""
    runs = [
        block.where
        for block in todo
        if block.language == "bash"
        for words in logical_lines(block.text)
        if words[:1] == ["torchrun"]
    ]
    parts = dict.fromkeys(runs, "")
    where = None
    for line in printed.splitlines():
        if line.startswith("== "):
            where = line.removeprefix("== ")
        elif where in parts:
            parts[where] += f"{line}\n"
    count = re.compile(r"^> megatron_dsa ran, calls per implementation:\n>   \w+: \w+ \d+", re.M)
    for where in parts:
        assert len(count.findall(parts[where])) == runs.count(where), f"{where} prints no count"


def logical_lines(text: str):
    """Return the words of every command, with joined lines, without assignments and
    redirections.
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        words = iter([*lexer, ";"])
        for word in words:
            if set(word) <= set("<>"):
                next(words)
            elif set(word) <= set("|&;"):
                yield command
                command = []
            elif not (not command and re.match(r"\w+=", word)):
                command.append(word)


@functools.cache
def training_flags() -> frozenset[str]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_dsa.arguments import add_dsa_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_dsa_arguments(add_megatron_arguments(parser))
    return frozenset(parser._option_string_actions)


def check_training(words):
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given <= training_flags(), given - training_flags()


def check_command(words: list[str]) -> None:
    """Raise unless a command and its flags of ours exist."""
    program, *rest = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)
    if program in ("cd", "export", "source", "git", "ruff", "mypy", "pytest", "mkdocs"):
        return
    if program == "docker" and rest[0] == "run":
        return
    if program == "docker":
        program, rest = "pip", [(ROOT / "Dockerfile").read_text()]
    if program == "pip":
        extras = re.findall(r"megatron-dsa\[([\w,]+)\]", " ".join(rest))
        setup = (ROOT / "setup.py").read_text()
        for extra in ",".join(extras).split(",") if extras else ():
            assert f'"{extra}": ' in setup, extra
    elif program == cli.SCRIPT:
        check_module("megatron_dsa", rest)
    elif program == "sbatch":
        scripts = [word for word in rest if word.startswith("examples/")]
        assert scripts[0].endswith(".sbatch") and (ROOT / scripts[0]).is_file()
        check_command(rest[rest.index(scripts[1]) :])
    elif program.endswith(".sh"):
        assert os.access(ROOT / program, os.X_OK), program
        subprocess.run(["bash", "-n", ROOT / program], check=True)
        if program.startswith("examples/"):
            check_training(rest)
    elif program in ("torchrun", "python") and (script := example_script(rest)):
        check_module(script.removesuffix(".py").replace("/", "."), rest[rest.index(script) + 1 :])
    elif program == "torchrun" or (program == "python" and "-m" in rest):
        module = rest[rest.index("-m") + 1]
        check_module(module, rest[rest.index("-m") + 2 :])
    elif program == "python":
        check_module(rest[0].removesuffix(".py").replace("/", "."), rest[1:])
    elif program.startswith("--"):  # flags of a training run, quoted separately
        check_training(words)
    else:
        raise AssertionError(f"no idea how to check {shlex.join(words)}; teach check_command")


def example_script(words: list[str]) -> str | None:
    """Return a command's Python script of ``examples/``."""
    return next((x for x in words if re.fullmatch(r"examples/\w+\.py", x)), None)


def check_module(module: str, flags: list[str]) -> None:
    if module == "megatron_dsa.pretrain":
        check_training(flags)
    elif module == "megatron_dsa":
        cli.build_parser().parse_args(flags)
    elif module == "benchmarks":
        check_benchmark(*flags)
    else:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        source = Path(spec.origin).read_text()
        for flag in (word for word in flags if word.startswith("--")):
            assert f'"{flag}"' in source, f"{module} {flag}"


def check_benchmark(family: str, *flags: str) -> None:
    from benchmarks.__main__ import plan_of

    assert family in ("charts", "pages") or plan_of(family, list(flags))


def check_python(text: str) -> None:
    """Raise unless it is Python, and its imports from this package exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_dsa"):
            known = names_of(node.module)
            for alias in node.names:
                assert alias.name in known, f"{node.module}.{alias.name}"


def names_of(module: str) -> set[str]:
    """Return the names of one of our modules; only defined ones if a package is missing."""
    try:
        return set(dir(importlib.import_module(module)))
    except ModuleNotFoundError as error:
        if error.name.startswith("megatron_dsa"):
            raise
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    return {node.name for node in ast.parse(source).body if hasattr(node, "name")}


@pytest.mark.parametrize(
    "command",
    [
        "python -m megatron_dsa frobnicate",
        "python -m megatron_dsa.nothing",
        "torchrun -m megatron_dsa.pretrain --attention-backend dsa_fused --no-such-flag 3",
        "examples/missing.sh",
        "examples/v3_2.sh --no-such-flag",
        "sbatch --nodes 2 examples/slurm.sbatch examples/missing.sh",
        "python -m benchmarks attention --no-such-flag",
        "python -m benchmarks frobnicate",
        "pip install 'megatron-dsa[nothing]'",
        "torchrun --nproc-per-node 2 examples/missing.py",
        "torchrun --nproc-per-node 2 examples/fsdp2_dsa.py --no-such-flag 3",
        "nonsense",
    ],
)
def test_check_finds_what_is_wrong(command):
    with pytest.raises((AssertionError, SystemExit, ModuleNotFoundError)):
        for words in filter(None, logical_lines(f"X=1 {command} ")):
            check_command(words)


def test_check_of_python_finds_what_is_wrong():
    with pytest.raises(AssertionError):
        check_python("from megatron_dsa.ops.layout.layout import nothing")
