"""Training: planned memory and operations, resumed runs, sparse and dense attention.

    python -m benchmarks train                              # memory of small models' steps
    python -m benchmarks train --kinds operations           # needs Nsight Compute
    python -m benchmarks train --kinds run                  # an interrupted and resumed run
    python -m benchmarks train --kinds convergence --runs 1 2
    python -m benchmarks train --kinds selected     # masked and sparse attention, every step
    python -m benchmarks train --kinds muon         # needs emerging-optimizers
    python -m benchmarks train --kinds whole-v4     # fused and in torch, every step
    python -m benchmarks train --kinds ranks        # one and several GPUs, every step

``memory``: planned and measured peak of a training step (:mod:`benchmarks.train.memory`).
``operations``: planned operations and those counted by tensor cores
(:mod:`benchmarks.train.operations`). ``run``: resumed and uninterrupted runs
(:mod:`benchmarks.train.resume`). The others compare the same training: ``convergence`` with several
attentions (:mod:`benchmarks.train.convergence`), ``selected`` with both attentions to selected keys
(:mod:`benchmarks.train.selected`), ``muon`` by AdamW and by Muon with and without blocks
(:mod:`benchmarks.train.muon`), ``whole-v4`` of a whole DeepSeek-V4 with fused kernels and in torch
(:mod:`benchmarks.train.whole`), ``ranks`` on one and several ranks (:mod:`benchmarks.train.ranks`).
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.settings import Settings, Work
from benchmarks.train import convergence, memory, muon, operations, ranks, resume, selected, whole
from benchmarks.train.models import CASES, command, model_of

CEILINGS = ()
ON_DEVICE = False
#: Seconds until a hanging run is ended.
TIMEOUT = 7200.0
KINDS = ("memory", "operations", "run", "convergence", "selected", "muon", "whole-v4", "ranks")
#: Kind -> module and class that train it, one way at a time.
TRAINED: dict[str, tuple[Any, Any]] = {
    "convergence": (convergence, convergence.Comparison),
    "selected": (selected, selected.SameTraining),
    "muon": (muon, muon.SameStart),
    "whole-v4": (whole, whole.SameModel),
}
#: Numbers in CASES: all stages, both models, experts, prediction, recomputation.
COUNTED = (0, 10, 7, 8, 9, 5, 6, 12)
TOKENS = {"v3.2": 8192, "v4": 2048}
OURS = "ours"


@dataclass(frozen=True)
class Case:
    """One model to train.

    Attributes:
        kind: one of :data:`KINDS`.
        model: name in :data:`~benchmarks.train.models.CASES`, of a kind of attention, or of a size.
        tokens: of a sequence; of a step of the kinds in :data:`TRAINED` and ``ranks``.
        steps: optimizer steps.
        run: number of the run; of the kinds in :data:`TRAINED` and ``ranks`` its seed.
        indexer_loss_coeff: if it differs from the script's.
    """

    kind: str
    model: str
    tokens: int
    steps: int = 1
    run: int = 1
    indexer_loss_coeff: float | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=["memory"], help="default: memory")
    add("--models", type=int, nargs="+", choices=range(len(CASES)), metavar="NUMBER",
        help=f"of memory and operations, 0 to {len(CASES) - 1} (all; with --quick 0)")  # fmt: skip
    add("--attentions", nargs="+", choices=TOKENS, default=list(TOKENS),
        help="of run and ranks (all)")  # fmt: skip
    add(
        "--runs",
        type=int,
        nargs="+",
        default=[1],
        help="seeds of all kinds but memory, operations and run (1)",
    )
    lengths = "50 of run, 300 of convergence (a multiple of 12), 100 of selected, 200 of others"
    add("--steps", type=int, help=lengths)


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    found, quick = [], options.quick
    for kind in options.kinds:
        if kind in ("memory", "operations"):
            usual = (0,) if quick else range(len(CASES)) if kind == "memory" else COUNTED
            for name, thousands, *_ in (CASES[number] for number in options.models or usual):
                found.append((Case(kind, name, 1024 * thousands), [Work("step", OURS)]))
        elif kind == "run":
            steps = options.steps or (8 if quick else 50)
            if steps <= resume.WARM_UP_STEPS:
                raise ValueError(f"--steps must be above {resume.WARM_UP_STEPS}, got {steps}")
            works = [Work("all", way) for way in resume.WAYS]
            found += [(Case(kind, name, TOKENS[name], steps), works) for name in options.attentions]
        elif kind == "ranks":
            for name in options.attentions:
                size = ranks.size_of(name, quick, options.steps)
                works = [Work("all", way) for way in ranks.WAYS[name]]
                tokens = size.batch * size.length
                found += [
                    (Case(kind, name, tokens, size.steps, run), works) for run in options.runs
                ]
        else:
            module, _ = TRAINED[kind]
            size = module.size_of(quick, options.steps)
            works = [Work("all", way) for way in module.WAYS]
            name, tokens = "tiny" if quick else "small", size.batch * size.length
            found += [(Case(kind, name, tokens, size.steps, run), works) for run in options.runs]
    return found


class _Measurer:
    def __init__(self, case: Case, settings: Settings):
        self.case, self.settings = case, settings
        self._folder = tempfile.TemporaryDirectory()
        self._comparison: Any = None
        self._straight: dict[str, dict] = {}

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        kinds = {
            "memory": self._memory, "operations": self._operations, "run": self._run,
            **dict.fromkeys((*TRAINED, "ranks"), self._trained),
        }  # fmt: skip
        yield from kinds[self.case.kind](work)

    def _command(self) -> list[str]:
        return command(*model_of(self.case.model, self.case.tokens), self.settings.quick)

    def _memory(self, work: Work) -> Iterator[tuple[str, dict]]:
        yield work.part, memory.compare(self._command())

    def _operations(self, work: Work) -> Iterator[tuple[str, dict]]:
        yield from operations.compare([*self._command(), "--global-batch-size", "1"])

    def _run(self, work: Work) -> Iterator[tuple[str, dict]]:
        models = resume.TINY_MODELS if self.settings.quick else resume.MODELS
        trial = resume.Trial(models[self.case.model], Path(self._folder.name), self.case.steps)
        found = list(trial.run(work.way))
        yield from found
        logged = {part: result for part, result in found if part != "all"}
        if work.way == "straight":
            self._straight = logged
        if work.way == "resumed" and self._straight:
            differ = resume.differences(self._straight, logged)
            if differ:
                yield work.part, {"status": "failed", "reason": "; ".join(differ[:5])}

    def _trained(self, work: Work) -> Iterator[tuple[str, dict]]:
        if self._comparison is None:
            quick, folder = self.settings.quick, Path(self._folder.name)
            if self.case.kind == "ranks":
                size = ranks.size_of(self.case.model, quick, self.case.steps)
                self._comparison = ranks.SameOnRanks(self.case.model, size, self.case.run, folder)
            else:
                module, make = TRAINED[self.case.kind]
                size = module.size_of(quick, self.case.steps)
                self._comparison = make(size, self.case.run, folder)
        yield from self._comparison.train(work.way)


def prepare(case: Case, device: torch.device, settings: Settings) -> _Measurer:
    from megatron_dsa.patches import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return _Measurer(case, settings)
