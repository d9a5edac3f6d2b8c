"""Contents of a release: version, files, and first steps from the wheel.

``scripts/release.sh`` sets the built files (``DIST``) and a Python with the wheel and its
dependencies (``WHEEL_PYTHON``). Otherwise both are made here without downloads. One test, in CI
(``CI`` is set), installs pip's newest versions; ``FRESH_INSTALL`` may hold more requirements, such
as torch==2.11.0.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import megatron_dsa
from megatron_dsa.training.quiet_output import RECORDS, WARNINGS
from tests.functional.launch import REPOSITORY, SPARSE, TINY, command_line, parse_steps

#: Read by setup.py, or shipped with the package.
BESIDE = ["CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.py"]


def run(*command, cwd: Path | None = None, variables: dict[str, str] | None = None) -> str:
    """Run a command outside of this repository, which must succeed; return its output.

    With an editable install in PYTHONPATH, pip would consider the wheel installed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def modules(root: Path) -> set[str]:
    """Return all files of the package except compiled ones, relative to its parent."""
    files = (root / "megatron_dsa").rglob("*")
    return {
        str(file.relative_to(root))
        for file in files
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the sdist, and the wheel from it; return their folder."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"])
    pytest.importorskip("build", reason="pip install 'megatron-dsa[test]'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in BESIDE:
        shutil.copy(REPOSITORY / name, source)
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "megatron_dsa", source / "megatron_dsa", ignore=without)
    # Files that must be excluded.
    shutil.copytree(REPOSITORY / "benchmarks", source / "benchmarks", ignore=without)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory):
    """Return a Python with the wheel and without this repository."""
    if "WHEEL_PYTHON" in os.environ:
        return os.environ["WHEEL_PYTHON"]
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", *dist.glob("*.whl"))
    (site,) = environment.glob("lib/*/site-packages")
    # After the wheel, without the .pth files, which may add this repository.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def installed(dist, environment, extras, *others):
    """Yield a Python with extras of the wheel and other requirements."""
    if "CI" not in os.environ:
        pytest.skip("downloads torch: set CI=1 to run it")
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    (wheel,) = dist.glob("*.whl")
    install_with(python, f"{wheel}[{extras}]", *others)
    yield str(python)
    shutil.rmtree(environment)  # several GB


@pytest.fixture(scope="module")
def fresh_python(dist, tmp_path_factory):
    """Return a Python with the wheel and its newest dependencies."""
    others = os.environ.get("FRESH_INSTALL", "").split()
    yield from installed(dist, tmp_path_factory.mktemp("fresh"), "train,hf", *others)


@pytest.fixture(scope="module")
def bare_python(dist, tmp_path_factory):
    """Return a Python with the wheel and its operations' dependencies, including this torch."""
    # The lock's version, in uv's cache.
    torch_here = f"torch=={torch.__version__.split('+')[0]}"
    yield from installed(dist, tmp_path_factory.mktemp("bare"), "torch", torch_here)


def install_with(python: Path, *requirements: str) -> None:
    """Install with uv if available, else with pip."""
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    run(*install, *requirements)


def test_version_and_change_log_agree():
    version = Version(megatron_dsa.__version__)
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    newest, *older = headings
    released = [Version(heading) for heading in (headings if newest != "Unreleased" else older)]
    assert released == sorted(released, reverse=True) and len(released) == len(set(released))
    if newest == "Unreleased":
        assert version.is_devrelease and Version(version.base_version) > released[0]
    else:
        assert version == released[0]


def test_files(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    version = megatron_dsa.__version__
    assert wheel.name == f"megatron_dsa-{version}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"megatron_dsa-{version}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == modules(REPOSITORY)
    metadata = zipfile.ZipFile(wheel).read(f"{info}METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata and "# megatron-dsa" in metadata
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert modules(REPOSITORY) <= names and {"README.md", "LICENSE", "setup.py"} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_operations_without_megatron(bare_python, tmp_path):
    bare = command_of(bare_python, tmp_path)
    found = "import importlib.util as u; print(u.find_spec('megatron'), u.find_spec('omegaconf'))"
    assert bare("-c", found).strip() == "None None"
    bare("-c", "import megatron_dsa.dsa_kernels, megatron_dsa.extras.torch_library")
    shutil.copy(REPOSITORY / "examples/fsdp2_dsa.py", tmp_path)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = ("--steps", "4", "--batch", "2", "--length", "64", "--losses", "losses.json")
    bare(*ranks, "fsdp2_dsa.py", *flags, "--compile", "aot_eager")
    losses = [step["lm loss"] for step in json.loads((tmp_path / "losses.json").read_text())]
    assert len(losses) == 4 and losses[-1] < losses[0]


def command_of(python, folder):
    """Return a function that runs ``python`` in ``folder`` as the only rank."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    # Any free port.
    rank |= {"MASTER_PORT": "0", "PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1"}
    return functools.partial(run, python, cwd=folder, variables=rank)


def test_first_steps_from_the_wheel(python, tmp_path):
    wheel = command_of(python, tmp_path)
    where = wheel("-c", "import megatron_dsa; print(megatron_dsa.__file__)").strip()
    assert not Path(where).is_relative_to(REPOSITORY / "megatron_dsa")
    assert Path(where).is_relative_to(Path(python).parents[1])
    assert f"megatron_dsa {megatron_dsa.__version__}" in wheel("-m", "megatron_dsa", "info")
    script = run(Path(python).with_name("megatron-dsa"), "--version", cwd=tmp_path)
    assert script.strip() == f"megatron_dsa {megatron_dsa.__version__}"
    wheel("-m", "megatron_dsa", "prepare-data", "--output", "topics")
    flags = command_line(TINY | {"--data-path": "topics", "--save": "run", "--save-interval": 4})
    log = wheel("-m", "megatron_dsa.pretrain", *flags)
    losses = [step["lm loss"] for step in parse_steps(log)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    for beginning in [each for each, _ in WARNINGS] + [each for _, each in RECORDS]:
        assert beginning not in log
    if not torch.cuda.is_available():
        assert log.count("no GPU: torch runs everything") == 1 and "(rejected:" not in log


def test_resume_and_export_in_a_fresh_environment(fresh_python, tmp_path):
    fresh = command_of(fresh_python, tmp_path)
    torch_version = fresh("-c", "import torch; print(torch.__version__)").strip()
    assert "warning: torch" not in fresh("-m", "megatron_dsa", "info"), torch_version
    fresh("-m", "megatron_dsa", "prepare-data", "--output", "topics")
    flags = TINY | {"--data-path": "topics", "--save": "run", "--load": "run", "--save-interval": 2}
    flags["--norm-epsilon"] = SPARSE["rms_norm_eps"]
    for last, stage in ((2, "dense"), (4, "sparse"), (6, "sparse")):
        more = {"--train-iters": last, "--dsa-stage": stage, "--use-distributed-optimizer": True}
        more["--override-opt_param-scheduler"] = True
        log = fresh("-m", "megatron_dsa.pretrain", *command_line(flags | more))
        assert [step["iteration"] for step in parse_steps(log)] == [last - 1, last], torch_version
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    export = ("export-hf", "--input", "run", "--config", "config.json", "--output", "hf")
    fresh("-m", "megatron_dsa", *export)
    fresh("-m", "megatron_dsa", "import-hf", "--input", "hf", "--output", "again")
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "release"
