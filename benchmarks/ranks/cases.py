"""Cases of several ranks: grids, layers, shardings, and one rank for comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.megatron_layer import LayerSpec
from benchmarks.settings import Work

#: Kinds of cases: attention layers; dense attention only.
LAYERS, DENSE = "layers", "dense"
#: Baselines; masked and recomputed ways have one of their kind.
ONE_RANK, ONE_RANK_MASKED = "one rank", "one rank masked"
ONE_RANK_RECOMPUTED = "one rank recomputed"
#: Baseline of dense layers.
ONE_RANK_DENSE = "one rank dense"
ALONE = (ONE_RANK, ONE_RANK_MASKED, ONE_RANK_DENSE, ONE_RANK_RECOMPUTED)
#: Context-parallel ways and their settings; all but ``plain`` overlap collectives.
CP_WAYS = {
    "zigzag": {}, "contiguous": {"cp_layout": "contiguous"}, "plain": {},
}  # fmt: skip
_MASKED = {"selected_attention": "masked"}
#: Context-parallel ways with baselines of their kind; V4 is not masked.
OTHER_CP_WAYS = ("masked", "recomputed")
#: Tensor-parallel ways.
TP_WAYS = {"heads": {"tp_mode": "heads"}, "rows": {"tp_mode": "sequence"}}
#: Tensor-parallel ways of V3.2 by masked dense attention.
MASKED_TP_WAYS = {
    "masked heads": {"tp_mode": "heads", **_MASKED}, "select": {"tp_mode": "select", **_MASKED},
}  # fmt: skip
#: The same with each rank's heads as teacher, without a sum over ranks.
OWN_TEACHERS = {f"{way}, own teacher": way for way in MASKED_TP_WAYS}
MASKED_TP_WAYS |= {own: MASKED_TP_WAYS[way] for own, way in OWN_TEACHERS.items()}
#: Tensor-parallel way of V3.2 by torch's dense attention.
DENSE_TP_WAYS = {"dense": {"tp_mode": "heads"}}
#: Way -> baseline other than :data:`ONE_RANK`.
BASES = {"masked": ONE_RANK_MASKED, "recomputed": ONE_RANK_RECOMPUTED}
BASES |= {base: base for base in BASES.values()}
BASES |= dict.fromkeys(MASKED_TP_WAYS, ONE_RANK_MASKED)
BASES |= dict.fromkeys((ONE_RANK_DENSE, *DENSE_TP_WAYS), ONE_RANK_DENSE)
DENSE_WAYS = ("ring", "gathered latents", "contiguous ring")


@dataclass(frozen=True)
class Grid:
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
        """Parse ``tp1cp2``."""
        found = re.fullmatch(r"tp([1-9]\d*)cp([1-9]\d*)", text)
        if not found:
            raise ValueError(f"a grid must be tp<ranks>cp<ranks>, like tp1cp2, got {text!r}")
        return cls(*map(int, found.groups()))


ONE = Grid()


@dataclass(frozen=True)
class Case:
    """The same work on one rank and on several.

    Attributes:
        kind: :data:`LAYERS` or :data:`DENSE`.
        preset: of the model.
        tokens: of all ranks.
        tp, cp: ranks.
        heads: of the attention; with dense attention, per rank.
        ratio: compression ratio of a CSA layer.
        layers: in a chain; times and bytes are per layer, memory is the chain's.
        graph: the step is one CUDA graph.
        workspace_mib: budget of torch implementations.
    """

    kind: str
    preset: str
    tokens: int
    tp: int = 1
    cp: int = 1
    heads: int | None = None
    ratio: int | None = None
    layers: int = 1
    graph: bool | None = None
    workspace_mib: int = 256

    @property
    def grid(self) -> Grid:
        return Grid(self.tp, self.cp)

    def grid_of(self, way: str) -> Grid:
        return ONE if way in ALONE else self.grid

    def spec(self, way: str) -> LayerSpec:
        grid = self.grid_of(way)
        recomputed = {"recompute": "latent_output" if self.ratio is None else "queries"}
        ways = CP_WAYS | TP_WAYS | MASKED_TP_WAYS | DENSE_TP_WAYS
        ways |= dict.fromkeys(("masked", ONE_RANK_MASKED), _MASKED)
        ways |= dict.fromkeys(("recomputed", ONE_RANK_RECOMPUTED), recomputed)
        changes = ways.get(way, {})
        if way in OWN_TEACHERS:
            changes = changes | {"indexer_loss_heads": 1 / grid.tp}
        return LayerSpec(
            self.preset, self.tokens, self.ratio, self.heads, layers=self.layers, tp=grid.tp,
            cp=grid.cp, workspace_mib=self.workspace_mib, **changes,
        )  # fmt: skip


#: Name -> fields of a layer.
NAMED = {
    "v3.2": {"preset": "v3.2", "heads": 128},
    "v3.2-h32": {"preset": "v3.2-h32", "heads": 32},
    "v4-flash-r4": {"preset": "v4-flash", "ratio": 4},
    "v4-flash-r128": {"preset": "v4-flash", "ratio": 128},
    # For a quick run on any machine.
    "tiny": {"preset": "tiny"},
    "tiny-r4": {"preset": "tiny", "ratio": 4},
    "tiny-r128": {"preset": "tiny", "ratio": 128},
}
#: Lengths with context parallelism, and for comparing tokens with heads.
CP_TOKENS = {"v3.2": (32768, 65536, 131072), "v4-flash-r4": (65536,), "v4-flash-r128": (65536,)}
TP_TOKENS = {
    "v3.2": (8192, 32768), "v3.2-h32": (8192, 32768), "v4-flash-r4": (32768,),
    "v4-flash-r128": (32768,),
}  # fmt: skip
DENSE_TOKENS = (32768, 65536)
QUICK_TOKENS = 256


def works_of(case: Case) -> list[Work]:
    """Return the measurements of a case, one rank first."""
    if case.kind == DENSE:
        return [Work("step", way) for way in (ONE_RANK, *DENSE_WAYS)]
    found = [ONE_RANK, *(CP_WAYS if case.cp > 1 else TP_WAYS)]
    if case.cp > 1:
        others = OTHER_CP_WAYS if case.ratio is None else ("recomputed",)
        found += [each for way in others for each in (BASES[way], way)]
    elif case.ratio is None:
        found += [ONE_RANK_MASKED, *MASKED_TP_WAYS, ONE_RANK_DENSE, *DENSE_TP_WAYS]
    return [Work("step", way) for way in found]


def layer_cases(grid: Grid, names, tokens=None, layers: int = 1, **more) -> list[Case]:
    """Return the layers of a grid, short ones first.

    Args:
        grid: several ranks.
        names: keys of :data:`NAMED`.
        tokens: lengths, ``None`` for the defaults.
        layers: in a chain.
        more: other fields of the cases.
    """
    known = CP_TOKENS if grid.cp > 1 else TP_TOKENS
    cases = [
        Case(LAYERS, tokens=n, tp=grid.tp, cp=grid.cp, layers=layers, **NAMED[name], **more)
        for name in names
        for n in tokens or ((QUICK_TOKENS,) if name.startswith("tiny") else known.get(name, ()))
    ]
    return sorted(cases, key=lambda case: case.tokens)
