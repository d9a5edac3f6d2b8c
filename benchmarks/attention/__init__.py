"""Sparse attention's operations: all implementations, checked against float64.

    python -m benchmarks attention
    python -m benchmarks attention --presets v3.2 --skv 8192 --operations forward backward

``forward`` and ``backward`` are sparse attention, ``teacher`` is the head sum of its probabilities,
for the last queries of a sequence. ``flashmla-raw`` is FlashMLA's kernel without our adapter
(:mod:`benchmarks.attention.raw`). FLOP count selected keys only. Selection and the indexer's
losses: family ``indexer``.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from benchmarks.attention import raw
from benchmarks.attention.inputs import Case, Inputs
from benchmarks.attention.lists import CLUSTERED_SHARE, parse_distribution
from benchmarks.attention.shapes import DEFAULT_PRESETS, OPERATIONS, PRESETS, flops
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, measure
from megatron_dsa.ops import OPERATIONS as DISPATCHED

CEILINGS = ("gemm", "copy")
ON_DEVICE = True
#: Short calls.
REPEATS = 30


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--presets", nargs="+", choices=PRESETS, help=f"default: {' '.join(DEFAULT_PRESETS)}")
    add("--skv", nargs="+", type=int, help="keys (8192 32768 131072, with --quick 96)")
    add("--distributions", nargs="+", default=["random", "clustered"],
        help="of the selected keys: random, sorted, clustered or clustered:SHARE (of keys that "
        "the next query keeps); default: random clustered")  # fmt: skip
    add(
        "--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="default: all"
    )
    add("--queries", type=int, help="the last of the keys' positions (4096, with --quick 32)")


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    quick = options.quick
    presets = options.presets or (["tiny"] if quick else DEFAULT_PRESETS)
    lengths = options.skv or ([96] if quick else [8192, 32768, 131072])
    queries = options.queries or (32 if quick else 4096)
    works = [Work(operation, way) for operation in options.operations for way in _ways(operation)]
    # One name per distribution, so that its results are compared.
    named = [f"clustered:{CLUSTERED_SHARE}" if d == "clustered" else d
             for d in options.distributions]  # fmt: skip
    cases = [Case(preset, queries, skv, distribution, options.workspace_mib)
             for preset, skv, distribution in product(presets, lengths, named)]  # fmt: skip
    for case in cases:
        check(case)
    return [(case, works) for case in cases]


def _ways(operation: str) -> list[str]:
    names = [candidate.name for candidate in DISPATCHED[OPERATIONS[operation]].candidates]
    if operation == "forward":
        names.insert(names.index(raw.ADAPTER), raw.WAY)
    return names


def check(case: Case) -> None:
    topk = PRESETS[case.preset].topk
    if case.skv < max(topk, case.queries):
        raise ValueError(
            f"--skv must be at least the number of queries ({case.queries}) and of selected "
            f"keys ({topk} for {case.preset}), got {case.skv}: raise it or lower --queries"
        )
    parse_distribution(case.distribution)


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.settings = case, settings
        self.inputs, self.clock = Inputs(case, device), Clock(device)

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        result = measure(
            self.inputs.call(work.part, work.way),
            lambda found: self.inputs.compare(work.part, work.way, found),
            self.clock, self.settings.repeats, self.settings.budget,
        )  # fmt: skip
        if result["status"] == "ok":
            flop = flops(work.part, PRESETS[self.case.preset], self.case.queries)
            result["tflops"] = flop / result["ms"] / 1e9
        yield work.part, result


prepare = _Measurer
