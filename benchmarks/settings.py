"""Settings shared by all cases of a run, and the interface of a family of cases."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

import torch

#: Family -> description of its cases; the module is ``benchmarks.<family>``.
FAMILIES = {
    "attention": "sparse attention's operations, every implementation",
    "masked": "masked dense attention of whole sequences, beside cuDNN's without a mask",
    "indexer": "selection and losses of whole sequences, beside megatron-core's",
    "csa": "memory-bound operations of DeepSeek-V4's attention",
    "connections": "hyper-connections: operations, and layers with and without them",
    "layer": "whole attention layers: time, memory, and where the time goes",
    "engine": "layers with transformer-engine's linears, in bf16 and FP8",
    "recall": "selection of a trained small model with its indexers' linears in FP8",
    "ranks": "layers and dense attention over several GPUs of one host",
    "train": "training: planned memory and operations, resumed runs, convergence",
}


@dataclass(frozen=True)
class Settings:
    """Measuring settings.

    Attributes:
        device: ``cuda`` or ``cpu``.
        repeats: timed calls, at most.
        budget: seconds of timed calls of one measurement; there is one call at least.
        timeout: seconds until something that does not answer is ended.
        quick: the shapes are tiny and the results mean nothing.
    """

    device: str
    repeats: int = 5
    budget: float = 5.0
    timeout: float = 600.0
    quick: bool = False


class Work(NamedTuple):
    """One measurement of a case: a way to do one part of it."""

    part: str
    way: str


class Measurer(Protocol):
    """A case in its measuring process: inputs, references, results for comparison."""

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        """Yield pairs of a part and its result, see :mod:`benchmarks.schema`.

        Raises:
            ImplementationError: the way cannot do this; the text has the reason.
        """


class Family(Protocol):
    """A module with the cases of one subject.

    Attributes:
        Case: a frozen dataclass, whose fields JSON can hold.
        CEILINGS: ``gemm``, ``copy`` or both: measured first in every process.
        ON_DEVICE: the process itself uses the device, and ends when that no longer works.
        REPEATS, TIMEOUT: optional; timed calls and seconds.
    """

    Case: type
    CEILINGS: tuple[str, ...]
    ON_DEVICE: bool

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the family's options."""

    def plan(self, options: Namespace) -> list[tuple[object, list[Work]]]:
        """Return the requested cases, each with its measurements in order.

        Raises:
            ValueError: an option is invalid; the text names it.
        """

    def prepare(self, case, device: torch.device, settings: Settings) -> Measurer:
        """Return a case's measurer."""


def load(family: str) -> Family:
    return import_module(f"benchmarks.{family}")
