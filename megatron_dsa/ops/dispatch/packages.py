"""Optional kernel packages: which versions can be used, and what was wrong with the others.

Kernel packages change behaviour without changing a signature, so versions are compared; attributes
are not probed. The history below is what makes a refusal explain itself.
"""

from dataclasses import dataclass

from megatron_dsa.versions import installed_version, is_before, module_exists, parse_version


@dataclass(frozen=True)
class Fix:
    """``what`` was wrong before ``version``."""

    version: str
    what: str


@dataclass(frozen=True)
class Need:
    """From ``since`` on, a package needs ``distribution`` in version ``minimum`` or later."""

    since: str
    distribution: str
    minimum: str


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        module: what is imported.
        install: how to get it, in words; ``{floor}`` stands for the lowest usable version.
        distribution: name of the distribution, ``None`` if it has no versions to compare.
        minimum: lowest usable version.
        tested: newest version that this package was run with.
        history: what newer versions repaired.
        known_bad: versions at or above ``minimum`` that cannot be used, and why.
        needs: other distributions that it needs; the last entry that applies counts.
    """

    module: str
    install: str
    distribution: str | None = None
    minimum: str | None = None
    tested: str | None = None
    history: tuple[Fix, ...] = ()
    known_bad: tuple[Fix, ...] = ()
    needs: tuple[Need, ...] = ()

    def version(self) -> tuple[int, ...]:
        """Installed version as a tuple of numbers, ``()`` if there is none to compare."""
        if self.distribution is None:
            return ()
        return parse_version(installed_version(self.distribution) or "")

    def problem(self, minimum: str | None = None) -> str | None:
        """Return why it cannot be used, with the fix, or ``None``.

        Args:
            minimum: a floor above the package's own, for an operation that needs more.
        """
        floor = minimum or self.minimum
        install = self.install.format(floor=floor)
        if not module_exists(self.module):
            return f"missing: {self.module} is not installed; {install}"
        if self.distribution is None:
            return None
        found = installed_version(self.distribution)
        if found is None:
            return (
                f"unknown version: {self.module} can be imported but {self.distribution} is not "
                f"installed as a distribution, so its version cannot be compared; {install}"
            )
        if floor is not None and is_before(found, floor):
            wrong = "; ".join(
                f"before {fix.version}: {fix.what}"
                for fix in self.history
                if parse_version(found) < parse_version(fix.version) <= parse_version(floor)
            )
            because = f" ({wrong})" if wrong else ""
            return (
                f"too old: {self.distribution} {found} found, >= {floor} needed{because}; {install}"
            )
        for bad in self.known_bad:
            if parse_version(found) == parse_version(bad.version):
                return f"known bad: {self.distribution} {found}: {bad.what}; {install}"
        return self._missing_need(found, install)

    def _missing_need(self, found: str, install: str) -> str | None:
        applying = [n for n in self.needs if parse_version(found) >= parse_version(n.since)]
        if not applying:
            return None
        need = applying[-1]
        have = installed_version(need.distribution)
        if have is not None and parse_version(have) >= parse_version(need.minimum):
            return None
        return (
            f"incomplete: {self.distribution} {found} needs {need.distribution} >= {need.minimum}, "
            f"found {have or 'none'}; {install}"
        )

    def untested(self) -> str | None:
        """Return a remark if the installed version is newer than what was run, else ``None``."""
        if self.distribution is None or self.tested is None:
            return None
        if self.version() <= parse_version(self.tested + ".999"):
            return None
        return (
            f"{self.distribution} {installed_version(self.distribution)} is newer than "
            f"{self.tested}, the last version that was tested: run `python -m megatron_dsa doctor`"
        )


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
    history=(
        Fix("1.24", "no sparse attention"),
        Fix("1.25", "no indexer kernels on Hopper"),
        Fix("1.26", "indexer masks aligned to the bottom right, global index ids by default"),
        Fix("1.27", "gradients around 1e11 on Hopper when heads are no multiple of 64"),
        Fix("1.29", "-1 ids, empty rows and topk_length wrong on Hopper: writes out of bounds"),
        Fix("1.30", "race in the indexer's key gradient on Hopper"),
        Fix("1.31", "top-k cannot break ties by index"),
        Fix("1.32", "no deterministic top-k, no workspace with the fp32 key gradient on Hopper"),
    ),
    needs=(
        Need("1.29", "nvidia-cutlass-dsl", "4.6.2"),
        Need("1.32", "nvidia-cutlass-dsl", "4.8.0"),
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
    needs=(Need("4.0.0b36", "nvidia-cutlass-dsl", "4.6.2"),),
)

TRITON = Package(
    module="triton",
    install="it comes with torch's CUDA builds (>= 2.11)",
    distribution="triton",
    minimum="3.6",
    tested="3.6",
)
