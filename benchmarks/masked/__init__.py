"""Masked dense attention of whole sequences: all implementations, and peers without a mask.

    python -m benchmarks masked
    python -m benchmarks masked --heads 128 --tokens 8192 --operations forward backward
    python -m benchmarks masked --model glm-5

The input is one causal sequence with lists of visible keys. ``forward`` and ``backward`` are
attention, ``teacher`` is the head sum of its probabilities; bits are given, tiles are found in each
call. Each result is compared with float64 in full. ``cudnn-dense`` is torch's causal attention by
cuDNN to all visible keys: the same pairs without a mask; some tokens of ``out`` or ``dq`` are
compared. ``flash4-dense`` is the same by FlashAttention 4, if installed. FLOP count all visible
pairs. ``forward/kernel`` etc. are the TileLang kernels of such calls, by the profiler: without
tiles, zeroed sums, rounding and lists of keys.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from benchmarks.attention.lists import CLUSTERED_SHARE, parse_distribution
from benchmarks.masked.inputs import Inputs
from benchmarks.masked.shapes import OPERATIONS, PEERS, Case, flops
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, measure, summary
from benchmarks.tracing import kernel_milliseconds
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED

CEILINGS = ("gemm",)
ON_DEVICE = True
REPEATS = 30
#: Profiled calls.
PROFILED = 10
#: Longer sequences take seconds per call in torch.
LONGEST_TORCH = 8192
#: Dims of a model, and the heads of its ranks (1, 2 or 8 tensor-parallel ones).
MODELS = {
    "v3.2": ({"nope": 128, "rope": 64, "v": 128}, [128, 64, 16]),
    "glm-5": ({"nope": 192, "rope": 64, "v": 256}, [64, 32, 8]),
    "glm-5.3": ({"nope": 256, "rope": 0, "v": 256}, [64, 32, 8]),
}
#: Dims and K of the quick run.
TINY = {"nope": 12, "rope": 8, "v": 10, "topk": 16}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="4096 8192 16384 32768, with --quick 200")
    add("--model", choices=MODELS, default="v3.2", help="whose dims; --quick has its own")
    add("--heads", type=int, nargs="+",
        help="of a rank: all of the model's, a half and an eighth, with --quick 3")  # fmt: skip
    add("--distributions", nargs="+", default=["random", "clustered"],
        help="random, clustered or clustered:SHARE; default: random clustered")  # fmt: skip
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    lengths = options.tokens or ([200] if options.quick else [4096, 8192, 16384, 32768])
    dims, heads = (TINY, [3]) if options.quick else MODELS[options.model]
    counts = options.heads or heads
    named = [f"clustered:{CLUSTERED_SHARE}" if d == "clustered" else d
             for d in options.distributions]  # fmt: skip
    cases = [Case(tokens, count, distribution=distribution, workspace_mib=options.workspace_mib,
                  **dims)
             for tokens, count, distribution in product(sorted(lengths), counts, named)
             ]  # fmt: skip
    works = [
        Work(operation, way)
        for operation in options.operations
        for way in (
            *(candidate.name for candidate in DISPATCHED[OPERATIONS[operation]].candidates),
            *(PEERS if operation != "teacher" else ()),
        )
    ]
    for case in cases:
        check(case)
    return [(case, works) for case in cases]


def check(case: Case) -> None:
    if case.tokens < case.topk:
        raise ValueError(f"--tokens must be at least K ({case.topk}), got {case.tokens}: raise it")
    parse_distribution(case.distribution)


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.settings = case, settings
        self.inputs, self.clock = Inputs(case, device), Clock(device)

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        if work.way == "torch" and self.case.tokens > LONGEST_TORCH:
            raise ImplementationError(f"more than {LONGEST_TORCH} tokens in torch: minutes")
        result = measure(
            self.inputs.call(*work), lambda found: self.inputs.compare(*work, found), self.clock,
            self.settings.repeats, self.settings.budget,
        )  # fmt: skip
        if result["status"] == "ok":
            result["tflops"] = flops(work.part, self.case) / result["ms"] / 1e9
        if work.way in PEERS:
            result["ran"] = "causal, without a mask of selected keys"
        yield work.part, result
        if result["status"] == "ok" and work.way == "tilelang":
            yield f"{work.part}/kernel", self._kernel(work)

    def _kernel(self, work: Work) -> dict:
        """Return the time of a call's TileLang kernels."""
        call = self.inputs.call(*work)
        times = [kernel_milliseconds(call, "masked_attention_") for _ in range(PROFILED)]
        result = {"status": "ok"} | summary(times)
        result["tflops"] = flops(work.part, self.case) / result["ms"] / 1e9
        return result


prepare = _Measurer
