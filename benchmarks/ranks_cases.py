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
    """

    part: str
    preset: str
    rows: int
    ratio: int | None = None
    heads: int | None = None
    cp_layout: str = "zigzag"
    tp_mode: str = "auto"
    simulated: int | None = None

    @property
    def name(self) -> str:
        """What ``--cases`` calls it."""
        return self.preset if self.ratio is None else f"{self.preset}-r{self.ratio}"

    def alone(self) -> Case:
        """Return the same on one rank, where nothing is spread."""
        return dataclasses.replace(self, cp_layout="zigzag", tp_mode="auto")

    def kind(self) -> Case:
        """Return what does not depend on the length."""
        return dataclasses.replace(self, rows=0)


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
#: Length at which the other way to divide rows is measured as well.
CONTIGUOUS_ROWS = {"v3.2": 65536, "tiny": 256}


def layer_cases(grid: Grid, names: Iterable[str], rows=None, quick: bool = False) -> list[Case]:
    """Return the cases of a grid of several ranks, short ones first: time may run out."""
    lengths = QUICK_ROWS if quick else CP_ROWS if grid.cp > 1 else TP_ROWS
    cases = []
    for name in names:
        for length in rows or lengths.get(name, ()):
            case = Case("layers", rows=length, **LAYERS[name])
            if grid.cp == 1:
                cases += [dataclasses.replace(case, tp_mode=mode) for mode in ("heads", "rows")]
                continue
            cases.append(case)
            # With lengths of the user's choice, for want of a better one at all of them.
            if name in CONTIGUOUS_ROWS and (rows or length == CONTIGUOUS_ROWS[name]):
                cases.append(dataclasses.replace(case, cp_layout="contiguous"))
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
            for mode in ("heads", "rows"):
                yield Case("simulated", preset, rows, tp_mode=mode, simulated=count)


def exchange_cases(cases: Iterable[Case]) -> list[Case]:
    """Return what the ranks of these simulated cases send to each other."""
    several = [case for case in cases if case.simulated > 1]
    return [dataclasses.replace(case, part="exchange") for case in several]
