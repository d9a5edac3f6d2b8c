"""Supported versions of Python, torch, megatron-core and optional packages."""

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_dsa.errors import VersionError

PYTHON_MIN = (3, 12)
TORCH_MIN = "2.6"
MEGATRON_MIN = "0.19"
MEGATRON_BELOW = "0.21"
#: Tested releases of megatron-core.
MEGATRON_RUN_WITH = "0.19.2"
MEGATRON_MAIN = "0.20.0 (main of 2026-08-22)"
#: Environment variable that allows later versions if set to 1.
ANY_HOST = "MEGATRON_DSA_ANY_HOST"
#: Module that megatron-core 0.18.2 and 0.17.1 lack.
_MODEL_CONFIG = "megatron.training.models.gpt"
#: First and last tested release of torch.
TORCH_RUN_WITH = ((2, 11), (2, 15))

#: Distribution -> (module, purpose).
OPTIONAL_PACKAGES = {
    "transformer-engine": ("transformer_engine", "Megatron's fused linears and norms (extra: te)"),
    "flash-mla": (
        "flash_mla",
        "sparse attention forward (build from github.com/deepseek-ai/FlashMLA)",
    ),
    "nvidia-cudnn-frontend": (
        "cudnn",
        "sparse attention backward and the indexer on Hopper (extra: cudnn)",
    ),
    "tilelang": ("tilelang", "our own kernels on Hopper (extra: tilelang)"),
    "flash-attn-4": (
        "flash_attn.cute",
        "dense attention where --dsa-impl dense_attention=flash4 names it "
        "(extra: flash-attention-4)",
    ),
    "fla-core": ("fla", "layers of Kimi Delta Attention (extra: kda)"),
    "emerging-optimizers": ("emerging_optimizers", "--optimizer muon (extra: muon)"),
}


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numeric release: ``"2.11.0+cu130" -> (2, 11, 0)``."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def is_before(found: str, floor: str) -> bool:
    """Return True if version ``found`` precedes ``floor``."""
    wanted = Version(floor)
    if wanted.is_prerelease:
        try:
            return Version(found) < wanted
        except InvalidVersion:
            pass
    return parse_version(found) < parse_version(floor)


def module_exists(name: str) -> bool:
    """Return True if a module exists, without importing its packages."""
    return _find_spec(name) is not None


def _find_spec(name: str) -> ModuleSpec | None:
    head, *inner = name.split(".")
    spec = importlib.util.find_spec(head)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        head = f"{head}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(head, spec.submodule_search_locations)
    return spec


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def host_version() -> str | None:
    """Return the version of the importable ``megatron.core``, be it a source tree or wheel."""
    if (package_info := _package_info()) is not None:
        # Importing Megatron's ``package_info`` runs git.
        text = package_info.read_text()
        found = dict(re.findall(r"""^([A-Z_]+) = ['"]?(\w*)['"]?$""", text, re.M))
        if {"MAJOR", "MINOR", "PATCH", "PRE_RELEASE"} <= set(found):
            return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(found)
    return installed_version("megatron-core")


def host_described() -> str:
    """Return megatron-core's version, with the folder of a source tree."""
    found, package_info = host_version(), _package_info()
    if package_info is None:
        return str(found)
    try:
        wheel = importlib.metadata.distribution("megatron-core").locate_file("megatron/core")
        if package_info.parent == wheel:
            return str(found)
    except importlib.metadata.PackageNotFoundError:
        pass
    return f"{found} in {package_info.parents[2]}"


def _package_info() -> Path | None:
    spec = _find_spec("megatron.core.package_info")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def optional_version(distribution: str) -> str | None:
    """Return a package's version, ``"unknown version"`` without metadata, or ``None``."""
    version = installed_version(distribution)
    module = OPTIONAL_PACKAGES[distribution][0]
    if version is None and module_exists(module):
        return "unknown version"
    return version


def why_not_transformer_engine(has_gpu: bool) -> str | None:
    """Return the reason why Megatron cannot use transformer-engine, if any."""
    if sys.modules.get("transformer_engine.pytorch") is not None:
        return None
    if installed_version("transformer-engine") is None:
        return "no transformer-engine"
    if not has_gpu:  # this package hides transformer-engine without a GPU
        return "transformer-engine needs a GPU"
    return _failed_import_of_transformer_engine()


@functools.cache
def _failed_import_of_transformer_engine() -> str | None:
    """Import transformer-engine before this package may hide the extension."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # incompatible versions may raise any error
        if not module_exists("transformer_engine_torch"):
            return "transformer-engine without its PyTorch extension (pip install the extra 'te')"
        first = (str(error).splitlines() or [""])[0]
        return f"transformer-engine cannot be imported ({type(error).__name__}: {first})"
    return None


def untested_versions() -> list[str]:
    warnings = []
    torch_version, (first, last) = installed_version("torch"), TORCH_RUN_WITH
    if torch_version and not first <= parse_version(torch_version)[:2] <= last:
        was, to = (".".join(map(str, release)) for release in TORCH_RUN_WITH)
        warnings.append(
            f"torch {torch_version}: this release was run with {was} to {to} only; if something "
            f"fails: pip install 'torch>={was},<{last[0]}.{last[1] + 1}'"
        )
    megatron = host_version()
    if megatron not in (None, MEGATRON_RUN_WITH):
        fails = f"if something fails: pip install 'megatron-core=={MEGATRON_RUN_WITH}'"
        if parse_version(megatron) >= parse_version(MEGATRON_BELOW):
            fails = f"{ANY_HOST} lets a newer one run: anything may fail, also silently"
        warnings.append(
            f"megatron-core {megatron}: this release was run with {MEGATRON_RUN_WITH} and "
            f"{MEGATRON_MAIN}; {fails}"
        )
    return warnings


def host_problem() -> str | None:
    """Return the reason why Python, torch or megatron-core is unsupported, if any."""
    if sys.version_info < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        have = ".".join(map(str, sys.version_info[:3]))
        return f"Python {have} found, >= {wanted} needed: create the environment with it."
    torch_version = installed_version("torch")
    if torch_version is None or parse_version(torch_version) < parse_version(TORCH_MIN):
        return (
            f"torch {torch_version or 'not installed'} found, >= {TORCH_MIN} needed: "
            f"pip install 'torch>={TORCH_MIN}'."
        )
    found = host_version()
    supported = f"megatron-core >= {MEGATRON_MIN}, < {MEGATRON_BELOW}"
    install = f"pip install 'megatron-core>={MEGATRON_MIN},<{MEGATRON_BELOW}'."
    if found is None:
        return f"megatron-core is not installed; supported: {supported}: {install}"
    if parse_version(found) < parse_version(MEGATRON_MIN):
        lacks = "" if module_exists(_MODEL_CONFIG) else f" (it has no {_MODEL_CONFIG})"
        return f"megatron-core {found} is too old{lacks}; supported: {supported}: {install}"
    if parse_version(found) >= parse_version(MEGATRON_BELOW) and os.environ.get(ANY_HOST) != "1":
        return (
            f"megatron-core {found} is newer than what this release supports ({supported}): "
            f"pip install 'megatron-core<{MEGATRON_BELOW}', install a newer megatron-dsa, or try "
            f"it with {ANY_HOST}=1."
        )
    return None


def require_supported_megatron() -> None:
    problem = host_problem()
    if problem is not None:
        raise VersionError(problem)
