"""What the benchmark over several GPUs measures: grids of ranks, and cases for each of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Tensor- and context-parallel ranks."""

    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def name(self) -> str:
        return f"tp{self.tp}cp{self.cp}"

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read ``tp1cp2``."""
        found = re.fullmatch(r"tp([1-9]\d*)cp([1-9]\d*)", text)
        if not found:
            raise ValueError(f"a grid must be tp<ranks>cp<ranks>, like tp1cp2, got {text!r}")
        return cls(*map(int, found.groups()))


ONE = Grid()


@dataclass(frozen=True)
class Case:
    """One measurement on a grid.

    Attributes:
        part: ``layers``; ``simulated``, the core of one of ``simulated`` tensor-parallel ranks on
            one GPU; ``exchange``, what these ranks send to each other.
        preset: of the model; heads: of its attention, ``None`` for the preset's.
        ratio: compression ratio, ``None`` for DSA.
        rows: of all ranks.
        cp_layout, tp_mode: see :class:`megatron_dsa.config.DSAOptions`.
        layers: in a chain; times and bytes are those of one.
        collectives: ``overlapped``, or ``plain``: see :mod:`benchmarks.ranks_plain`.
    """

    part: str
    preset: str
    rows: int
    ratio: int | None = None
    heads: int | None = None
    cp_layout: str = "zigzag"
    tp_mode: str = "auto"
    simulated: int | None = None
    layers: int = 1
    collectives: str = "overlapped"

    @property
    def name(self) -> str:
        """What ``--cases`` calls it."""
        return self.preset if self.ratio is None else f"{self.preset}-r{self.ratio}"

    def alone(self) -> Case:
        """Return the same on one rank, where nothing is sharded."""
        return dataclasses.replace(
            self, cp_layout="zigzag", tp_mode="auto", collectives="overlapped"
        )

    def compiled(self) -> Case:
        """Return what kernels are compiled for: whatever changes none of them is as by default."""
        return dataclasses.replace(
            self, rows=0, cp_layout="zigzag", layers=1, collectives="overlapped"
        )

    def sharding(self, grid: Grid) -> Grid:
        """Return the ranks over which the case is sharded: of simulated ones there is one GPU."""
        return Grid(self.simulated, 1) if self.simulated else grid


_DSA, _HYBRID = (32768, 65536, 131072), (65536,)
#: Name -> fields of a layer.
LAYERS = {
    "v3.2": {"preset": "v3.2", "heads": 128},
    "v3.2-h32": {"preset": "v3.2-h32", "heads": 32},
    "v4-flash-r4": {"preset": "v4-flash", "ratio": 4},
    "v4-flash-r128": {"preset": "v4-flash", "ratio": 128},
    # For trying the benchmark itself on any machine.
    "tiny": {"preset": "tiny"},
    "tiny-r4": {"preset": "tiny", "ratio": 4},
    "tiny-r128": {"preset": "tiny", "ratio": 128},
}
#: Lengths with context parallelism, and without: of the comparison of rows and heads.
CP_ROWS = {"v3.2": _DSA, "v4-flash-r4": _HYBRID, "v4-flash-r128": _HYBRID}
TP_ROWS = {"v3.2": (8192, 32768), "v3.2-h32": (8192, 32768)}
QUICK_ROWS = {name: (256,) for name in LAYERS if name.startswith("tiny")}
SIMULATED_ROWS = (8192, 32768)
#: Ways to run a layer, and what they change: over context-parallel, over tensor-parallel ranks.
CP_VARIANTS = {
    "zigzag": {},
    "contiguous": {"cp_layout": "contiguous"},
    "plain": {"collectives": "plain"},
}
TP_VARIANTS = {"heads": {"tp_mode": "heads"}, "rows": {"tp_mode": "rows"}}
#: Layer -> length at which not only the first of its context-parallel variants is measured.
VARIANTS_ROWS = {"v3.2": 65536, "tiny": 256}


def variants_of(grid: Grid, wanted: Iterable[str] | None = None) -> list[str]:
    """Return the variants of a grid of several ranks that are ``wanted`` (``None``: all)."""
    known = CP_VARIANTS if grid.cp > 1 else TP_VARIANTS
    return [name for name in known if wanted is None or name in wanted]


def layer_cases(
    grid: Grid, names: Iterable[str], rows=None, quick: bool = False, wanted=None, layers: int = 1
) -> list[Case]:
    """Return the cases of a grid of several ranks, short ones first: time may run out.

    Args:
        grid: the ranks.
        names: keys of :data:`LAYERS`.
        rows: lengths, ``None`` for those of the grid and the layer.
        quick: take tiny lengths by default.
        wanted: variants, ``None`` for the first everywhere and the others where they tell most.
        layers: in a chain.
    """
    lengths = QUICK_ROWS if quick else CP_ROWS if grid.cp > 1 else TP_ROWS
    cases = []
    for name in names:
        for length in rows or lengths.get(name, ()):
            case = Case("layers", rows=length, layers=layers, **LAYERS[name])
            chosen = variants_of(grid, wanted)
            # With lengths of the user's choice, for want of a better one at all of them.
            everything = name in VARIANTS_ROWS and (rows or length == VARIANTS_ROWS[name])
            if grid.cp > 1 and wanted is None and not everything:
                chosen = chosen[:1]
            changes = CP_VARIANTS | TP_VARIANTS
            cases += [dataclasses.replace(case, **changes[variant]) for variant in chosen]
    return sorted(cases, key=lambda case: case.rows)


def baseline(cases: Iterable[Case]) -> list[Case]:
    """Return what one rank measures for these cases to be compared with."""
    found = dict.fromkeys(case.alone() for case in cases)
    return sorted(found, key=lambda case: case.rows)


def simulated_cases(ranks: Iterable[int], lengths: Iterable[int], preset: str) -> Iterator[Case]:
    """Yield the cores of one of ``ranks``, and first of one that has everything."""
    for rows in lengths:
        yield Case("simulated", preset, rows, tp_mode="heads", simulated=1)
        for count in ranks:
            for mode in ("heads", "sequence"):
                yield Case("simulated", preset, rows, tp_mode=mode, simulated=count)


def exchange_cases(cases: Iterable[Case]) -> list[Case]:
    """Return what the ranks of these simulated cases send to each other."""
    several = [case for case in cases if case.simulated > 1]
    return [dataclasses.replace(case, part="exchange") for case in several]
