"""Attention over several GPUs of one host: context parallelism, tokens against heads.

    python -m benchmarks ranks                          # layers on 2 GPUs
    python -m benchmarks ranks --grids tp1cp4 --layers v3.2 --tokens 65536 131072 --dry-run
    python -m benchmarks ranks --kinds dense --grids tp1cp4

A grid has one process per GPU (:mod:`benchmarks.ranks.processes`); a failing or hanging rank ends
its measurement for all ranks of the grid, in bounded time. All ranks start a call together and the
slowest counts. ``one rank`` measures the same on one GPU in the same run, ``one rank masked`` by
masked dense attention, for masked ways: efficiency is its time, divided by the ranks and by theirs.
Communication is exposed while only NCCL's kernels run. Bytes are counted at the collectives' calls,
and compared with the design (:mod:`benchmarks.ranks.traffic`).

``layers``: attention layers. Context parallelism has the ways ``zigzag`` and ``contiguous``
(layouts), and ``plain``: zigzag without overlapped collectives (:mod:`benchmarks.ranks.plain`);
V3.2 also zigzag by masked dense attention (``masked``), and V3.2 and V4 with ``--dsa-recompute``
(``recomputed``), compared with one rank of the kind. Tensor-parallel ranks divide ``heads`` or
tokens (``rows``); V3.2's by masked dense attention heads (``masked heads``), or heads for attention
and tokens for selection (``select``); ``dense`` is torch's dense attention, compared with ``one
rank dense``. ``--chain N`` measures N layers in a chain (:mod:`benchmarks.megatron_layer`),
``--graph`` steps as one CUDA graph each (:mod:`benchmarks.layer.graph`).

``dense``: dense causal attention, with several ways to distribute keys and values
(:mod:`benchmarks.ranks.dense`).
"""

import argparse
from collections.abc import Iterator

import torch

from benchmarks.ranks.cases import (
    DENSE,
    DENSE_TOKENS,
    LAYERS,
    NAMED,
    ONE,
    QUICK_TOKENS,
    Case,
    Grid,
    layer_cases,
    works_of,
)
from benchmarks.ranks.merge import Judge, merge
from benchmarks.ranks.processes import Grids, RankFailed
from benchmarks.settings import Settings, Work
from megatron_dsa.errors import ImplementationError

CEILINGS = ()
ON_DEVICE = False
KINDS = (LAYERS, DENSE)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    add("--grids", nargs="+", metavar="GRID", default=["tp1cp2", "tp2cp1"],
        help="of several ranks (tp1cp2 tp2cp1)")  # fmt: skip
    add(
        "--layers",
        nargs="+",
        choices=list(NAMED),
        help="default: all but tiny ones, with --quick tiny",
    )
    add("--tokens", nargs="+", type=int, help="of all ranks; default: depends on the case")
    add("--chain", type=int, default=1, metavar="N",
        help="layers in a chain: the host is ahead of the GPU, as in a model (1)")  # fmt: skip
    add("--graph", action="store_true", help="steps of layers as CUDA graphs")
    add("--heads", type=int, help="of dense attention, on each GPU (128, with --quick 2)")


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    quick, more = options.quick, {"workspace_mib": options.workspace_mib}
    of_layers = more | {"graph": options.graph or None}
    grids = [grid for grid in map(Grid.parse, options.grids) if grid != ONE]
    if not grids:
        raise ValueError("--grids must have a grid of several ranks: one rank is measured always")
    step = 128 * max(grid.ranks for grid in grids)
    if bad := [n for n in options.tokens or () if n < step or n % step]:
        # Every rank needs a group of every layer.
        raise ValueError(f"--tokens must be positive multiples of {step}, got {bad[0]}")
    if options.chain < 1:
        raise ValueError(f"--chain must be positive, got {options.chain}")
    usual = [name for name in NAMED if not name.startswith("tiny")]
    names = options.layers or (["tiny"] if quick else usual)
    cases = []
    for kind in options.kinds:
        if kind == LAYERS:
            for grid in grids:
                cases += layer_cases(grid, names, options.tokens, options.chain, **of_layers)
        else:
            heads = options.heads or (2 if quick else 128)
            cases += [
                Case(DENSE, "v3.2", n, cp=grid.cp, heads=heads, **more)
                for grid in grids if grid.tp == 1
                for n in options.tokens or ([QUICK_TOKENS] if quick else DENSE_TOKENS)
            ]  # fmt: skip
    return [(case, works_of(case)) for case in cases]


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings, measured=None):
        self.case, self.settings, self._device = case, settings, device
        self._measured = measured or Grids().measured
        self._gpus = torch.cuda.device_count() if device.type == "cuda" else None
        self._judge = Judge(case)

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        grid = self.case.grid_of(work.way)
        if self.case.graph and self._device.type != "cuda":
            raise ImplementationError("CUDA graphs need a GPU")
        if self._gpus is not None and grid.ranks > self._gpus:
            raise ImplementationError(f"{grid.name} needs {grid.ranks} GPUs, not {self._gpus}")
        settings = {"repeats": self.settings.repeats, "budget": self.settings.budget}
        # Ranks must end before the process of the case.
        timeout = 0.9 * self.settings.timeout
        try:
            answers = self._measured(self.case, work.way, settings, timeout)
        except RankFailed as error:
            yield work.part, {"status": "failed", "reason": str(error)}
            return
        for part, result in merge(answers):
            yield part, self._judge.judged(work.way, part, result, answers)


prepare = _Measurer
