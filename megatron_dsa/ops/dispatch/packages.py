"""Optional kernel packages and their usable versions.

Versions decide, since packages change behaviour under the same signature.
"""

import functools
import importlib
from dataclasses import dataclass

from megatron_dsa.versions import installed_version, is_before, module_exists, parse_version

#: Beginning of reasons that are warnings also when another fused kernel runs.
BROKEN = "broken"


class Reason(str):
    """Reason against a candidate: ``short`` names the obstacle, the string adds the fix."""

    short: str

    def __new__(cls, short: str, more: str = ""):
        self = super().__new__(cls, short + more)
        self.short = short
        return self


@dataclass(frozen=True)
class Package:
    """Optional kernel package.

    Attributes:
        install: how to install it; ``{floor}`` is the lowest usable version.
        distribution: name on PyPI; ``None`` if there are no versions to compare.
        tested: newest version that was run.
        fixes: pairs of a version and the defect fixed in it.
        needs: dependencies ``(since, distribution, minimum)``; of all entries with
            ``version >= since`` the last applies.
    """

    module: str
    install: str
    distribution: str | None = None
    minimum: str | None = None
    tested: str | None = None
    fixes: tuple[tuple[str, str], ...] = ()
    needs: tuple[tuple[str, str, str], ...] = ()

    def version(self) -> tuple[int, ...]:
        return parse_version((self.distribution and installed_version(self.distribution)) or "")

    def problem(self, minimum: str | None = None) -> Reason | None:
        """Return why the package is unusable; ``minimum`` overrides the lowest usable version."""
        floor, name = minimum or self.minimum, self.distribution
        install = f"; {self.install.format(floor=floor)}"
        if not module_exists(self.module):
            return Reason(f"missing: {self.module} is not installed", install)
        if name is None:
            return None
        found = installed_version(name)
        if found is None:
            return Reason(
                f"unknown version: {self.module} can be imported but {name} is not installed as a "
                "distribution",
                f", so its version cannot be compared{install}",
            )
        version = parse_version(found)
        if floor is not None and is_before(found, floor):
            wrong = "; ".join(
                f"before {fix}: {defect}"
                for fix, defect in self.fixes
                if version < parse_version(fix) <= parse_version(floor)
            )
            because = f" ({wrong})" if wrong else ""
            needed = f", >= {floor} needed{because}{install}"
            return Reason(f"too old: {name} {found} found", needed)
        applying = [need for since, *need in self.needs if version >= parse_version(since)]
        for distribution, least in applying[-1:]:
            have = installed_version(distribution)
            if have is None or parse_version(have) < parse_version(least):
                return Reason(
                    f"incomplete: {name} {found} needs {distribution} >= {least}",
                    f", found {have or 'none'}{install}",
                )
        return None

    def import_problem(self, minimum: str | None = None) -> Reason | None:
        """Import the package; return why that failed, e.g. kernels built for another torch."""
        if (error := import_error(self.module)) is None:
            return None
        return Reason(
            f"{BROKEN}: {self.module} cannot be imported",
            f" ({error}); reinstall it: {self.install.format(floor=minimum or self.minimum)}",
        )

    def untested(self) -> str | None:
        if self.tested is None or self.version() <= parse_version(self.tested + ".999"):
            return None
        return (
            f"{self.distribution} {installed_version(str(self.distribution))} is newer than "
            f"{self.tested}, the last version that was tested: run `python -m megatron_dsa doctor`"
        )


@functools.cache
def import_error(module: str) -> str | None:
    """Import a module; return type and first line of the error, of any kind."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return None


FLASH_MLA = Package(
    module="flash_mla",
    install="build it from github.com/deepseek-ai/FlashMLA (the package of that name on PyPI has "
    "no sparse kernels)",
)

CUDNN = Package(
    module="cudnn",
    install="pip install 'nvidia-cudnn-frontend[cutedsl]>={floor}'",
    distribution="nvidia-cudnn-frontend",
    minimum="1.30",
    tested="1.32",
    fixes=(
        ("1.24", "no sparse attention"),
        ("1.25", "no indexer kernels on Hopper"),
        ("1.26", "indexer masks aligned to the bottom right, global index ids by default"),
        ("1.27", "gradients around 1e11 on Hopper when heads are no multiple of 64"),
        ("1.29", "-1 ids, empty rows and topk_length wrong on Hopper: writes out of bounds"),
        ("1.30", "race in the indexer's key gradient on Hopper"),
        ("1.31", "top-k cannot break ties by index"),
        ("1.32", "no deterministic top-k, no workspace with the fp32 key gradient on Hopper"),
    ),
    needs=(
        ("1.29", "nvidia-cutlass-dsl", "4.6.2"),
        ("1.32", "nvidia-cutlass-dsl", "4.8.0"),
    ),
)

TILELANG = Package(
    module="tilelang",
    install="pip install 'tilelang>={floor}'",
    distribution="tilelang",
    minimum="0.1.15",
    tested="0.1.15",
)

EMERGING_OPTIMIZERS = Package(
    module="emerging_optimizers",
    install="pip install 'emerging-optimizers>={floor}' (the extra 'muon')",
    distribution="emerging-optimizers",
    minimum="0.3",
    tested="0.3",
)

FLASH_ATTENTION_4 = Package(
    module="flash_attn.cute",
    install="pip install 'flash-attn-4>={floor}' (the extra 'flash-attention-4'; with CUDA 13 "
    "'flash-attn-4[cu13]')",
    distribution="flash-attn-4",
    minimum="4.0.0b36",
    tested="4.0.0",
    needs=(("4.0.0b36", "nvidia-cutlass-dsl", "4.6.2"),),
)

FLA = Package(
    module="fla",
    install="pip install 'fla-core>={floor}' (the extra 'kda')",
    distribution="fla-core",
    minimum="0.6",
    tested="0.6.0",
)

TRITON = Package(
    module="triton",
    install="it comes with torch's CUDA builds (>= 2.11)",
    distribution="triton",
    minimum="3.6",
    tested="3.6",
)
