"""Memory-bound operations of DeepSeek-V4's attention: compressor, rope, key lists.

    python -m benchmarks csa
    python -m benchmarks csa --tokens 4096 --ways triton

Each is compared with its necessary traffic and a plain copy in the same process. Ways: this
package's ``triton`` kernel, its memory-bounded ``torch`` implementation, and ``eager``, plain torch
expressions with autograd. Whole layers: family ``layer``.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.csa.pieces import SHAPES, Job, measure_piece, pieces_of
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock

CEILINGS = ("copy",)
ON_DEVICE = True
#: Short calls.
REPEATS = 20
WAYS = ("triton", "torch", "eager")
#: Larger queries are skipped: several copies fill a GPU.
MOST_HEADS = 65536 * 64
#: Half a millisecond of cycles before each timed call, more than a fused call's launches take.
HEAD_START = 10**6


@dataclass(frozen=True)
class Case:
    """All pieces of a model's layers.

    Attributes:
        preset: key of :data:`~benchmarks.csa.pieces.SHAPES`.
        tokens: of one causal sequence.
        workspace_mib: budget of torch implementations.
    """

    preset: str
    tokens: int
    workspace_mib: int = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", nargs="+", choices=SHAPES, help="v4-flash v4-pro")
    parser.add_argument("--tokens", nargs="+", type=int,
                        help="multiples of 128 (4096 16384 65536, with --quick 256)")  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    """Return a case per preset and length; shared pieces are measured with the first preset."""
    presets = options.presets or (["tiny"] if options.quick else ["v4-flash", "v4-pro"])
    lengths = options.tokens or ([256] if options.quick else [4096, 16384, 65536])
    if bad := [n for n in lengths if n < 128 or n % 128]:
        # The eager compressor needs whole groups, and every layer at least one.
        raise ValueError(f"--tokens must be positive multiples of 128, got {bad[0]}")
    cases, seen = [], set()
    for tokens in lengths:
        for preset in presets:
            works = []
            for piece in pieces_of(SHAPES[preset]):
                too_long = tokens * (piece.heads or 0) > MOST_HEADS
                if (tokens, piece) in seen or too_long:
                    continue
                seen.add((tokens, piece))
                works += [Work(piece.name, way) for way in WAYS]
            cases.append((Case(preset, tokens, options.workspace_mib), works))
    return cases


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.device, self.settings = case, device, settings
        self.clock = Clock(device, HEAD_START)
        self.pieces = {piece.name: piece for piece in pieces_of(SHAPES[case.preset])}

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        case = self.case
        job = Job(
            self.pieces[work.part], SHAPES[case.preset], case.tokens, work.way, case.workspace_mib
        )
        yield work.part, measure_piece(job, self.device, self.clock, self.settings)


prepare = _Measurer
