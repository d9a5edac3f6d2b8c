"""Hyper-connections of DeepSeek-V4: their operations, and layers with and without them.

    python -m benchmarks connections
    python -m benchmarks connections --presets v4-flash --tokens 8192 --ways triton compiled

Operations are compared with their necessary traffic and a plain copy in the same process. Ways:
this package's ``triton`` kernels, its memory-bounded ``torch`` implementation, and ``compiled``,
plain expressions through ``torch.compile``. The part ``step`` is forward and backward of two
transformer layers, of ratio 4 and 128, with fewer experts than the model but as many per token:
``plain`` has one residual, ``streams`` has four.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.connections.layers import CHANNELS, measure_layers
from benchmarks.connections.operations import TRAFFIC, Job, measure_operation
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock

CEILINGS = ("copy",)
ON_DEVICE = True
#: Short calls.
REPEATS = 20
WAYS, LAYER_WAYS = ("triton", "compiled", "torch"), ("plain", "streams")
#: Two milliseconds of cycles before each timed call, more than a fused call's launches take.
HEAD_START = 4 * 10**6


@dataclass(frozen=True)
class Case:
    """Streams of a model's width.

    Attributes:
        preset: key of :data:`~benchmarks.connections.layers.CHANNELS`.
        tokens: of one sequence.
        workspace_mib: budget of torch implementations.
    """

    preset: str
    tokens: int
    workspace_mib: int = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", nargs="+", choices=CHANNELS, help="v4-flash v4-pro")
    parser.add_argument("--tokens", nargs="+", type=int,
                        help="(4096 8192 16384, with --quick 256)")  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    presets = options.presets or (["tiny"] if options.quick else ["v4-flash", "v4-pro"])
    lengths = options.tokens or ([256] if options.quick else [4096, 8192, 16384])
    works = [Work(part, way) for part in TRAFFIC for way in WAYS]
    works += [Work("step", way) for way in LAYER_WAYS]
    return [
        (Case(preset, tokens, options.workspace_mib), works)
        for tokens in lengths
        for preset in presets
    ]


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.device, self.settings = case, device, settings

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        case = self.case
        if work.part == "step":
            clock = Clock(self.device)
            result = measure_layers(case.preset, case.tokens, work.way, clock, self.settings)
        else:
            budget = case.workspace_mib * 2**20
            job = Job(work.part, case.tokens, CHANNELS[case.preset], work.way, budget)
            clock = Clock(self.device, HEAD_START)
            result = measure_operation(job, self.device, clock, self.settings)
        yield work.part, result


prepare = _Measurer
