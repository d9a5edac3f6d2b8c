"""Versions of megatron-core: the imported one counts, and is rejected before anything else.

The trees hold only Megatron's version, so other imports would fail differently.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dsa import versions
from megatron_dsa.errors import VersionError
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_INFO = """
MAJOR = {}
MINOR = {}
PATCH = {}
PRE_RELEASE = '{}'
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
raise RuntimeError("imported")
"""
TOO_OLD = "is too old (it has no megatron.training.models.gpt); supported: megatron-core >= 0.19"
TOO_NEW = "is newer than what this release supports"
COMMANDS = (
    "-m megatron_dsa.pretrain --train-iters 1",
    "-m megatron_dsa.pretrain --dsa-dry-run",
    "-m megatron_dsa generate --load none --prompt a",
    "-m megatron_dsa prepare-data --input none --output none",
)


def tree(folder: Path, version: str, pre_release: str = "") -> Path:
    """Write a source tree with a version and an empty ``megatron.training``."""
    core, training = folder / "megatron" / "core", folder / "megatron" / "training"
    for package in (core, training):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    (core / "package_info.py").write_text(PACKAGE_INFO.format(*version.split("."), pre_release))
    return folder


@pytest.fixture
def host(monkeypatch):
    """Imitate a version; ``megatron.core`` stays."""
    return lambda version: monkeypatch.setattr(versions, "host_version", lambda: version)


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Return the results of a new process with a tree before the installed wheel."""

    def found(version: str, pre_release: str = "") -> tuple[str | None, str]:
        monkeypatch.setattr(sys, "path", [str(tree(tmp_path, version, pre_release)), *sys.path])
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        return versions.host_version.__wrapped__(), versions.host_described()

    versions.host_version.cache_clear()
    yield found
    versions.host_version.cache_clear()


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(folder), **variables},
    )  # fmt: skip


def test_a_source_tree_hides_the_wheel(found, tmp_path):
    version, described = found("0.20.0", "rc1")
    assert version == "0.20.0rc1" and described.startswith(f"0.20.0rc1 in {tmp_path}")


@pytest.mark.parametrize("command", COMMANDS, ids=[c.split(maxsplit=1)[1] for c in COMMANDS])
@pytest.mark.parametrize(("version", "why"), [("0.17.1", TOO_OLD), ("0.21.0", TOO_NEW)])
def test_other_versions_are_refused_before_anything_else(version, why, command, tmp_path):
    done = run(command, tree(tmp_path, version), RANK="wrong")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: megatron-core {version} {why}"), done.stderr
    assert done.stderr.count("\n") == 1 and "pip install 'megatron-core" in done.stderr


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "megatron-core is not installed"),
        ("0.18.2", "megatron-core 0.18.2 is too old"),
        ("0.21.0rc1", "megatron-core 0.21.0rc1 is newer than .* MEGATRON_DSA_ANY_HOST=1"),
    ],
)
def test_refused_in_python(version, message, host):
    from megatron_dsa.patches import cpu_host

    host(version)
    for check in (versions.require_supported_megatron, cpu_host.activate):
        with pytest.raises(VersionError, match=message):
            check()


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.20.0rc1", "0.20.0", "0.20.3"])
def test_supported(version, host):
    host(version)
    versions.require_supported_megatron()
    said = [line for line in versions.untested_versions() if line.startswith("megatron-core")]
    assert not said if version == "0.19.2" else "0.20.0 (main of 2026-08-22)" in said[0]


def test_a_newer_one_may_be_tried(host, monkeypatch):
    monkeypatch.setenv(versions.ANY_HOST, "1")
    host("0.22.0")
    versions.require_supported_megatron()
    assert any(
        "MEGATRON_DSA_ANY_HOST lets a newer" in line for line in versions.untested_versions()
    )
    host("0.18.2")
    with pytest.raises(VersionError, match="too old"):
        versions.require_supported_megatron()


def linked(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "scripts/megatron_tree.sh", folder], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_source_tree_is_compiled_elsewhere(tmp_path):
    datasets = tree(tmp_path, "0.20.0") / "megatron" / "core" / "datasets"
    datasets.mkdir()
    for name in ("helpers.cpp", "Makefile", "utils.py"):
        (datasets / name).write_text("")
    before = sorted(tmp_path.rglob("*"))
    done = linked(tmp_path)
    assert done.returncode == 0, done.stderr
    links = Path(done.stdout.strip())
    try:
        found = {
            path.name.partition(".")[0] for path in (links / "megatron/core/datasets").iterdir()
        }
        assert found == {"helpers", "helpers_cpp", "utils"}
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        shutil.rmtree(links)


def test_a_folder_without_megatron_is_refused(tmp_path):
    done = linked(tmp_path)
    assert done.returncode == 2 and "must be a clone of NVIDIA/Megatron-LM" in done.stderr
