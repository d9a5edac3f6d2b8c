"""What all cases of a run have in common, and what a family of cases has to offer."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

import torch

#: Family -> what its cases are; the module is ``benchmarks.<family>``.
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
    """How to measure.

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
    """A case in the process that measures it: inputs, references, results to compare with."""

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        """Yield pairs of a part and its result, see :mod:`benchmarks.schema`.

        Raises:
            ImplementationError: the way cannot do this; the text says why.
        """


class Family(Protocol):
    """A module with the cases of one subject.

    Attributes:
        Case: a frozen dataclass, whose fields JSON can hold.
        CEILINGS: ``gemm``, ``copy`` or both: measured first in every process, for shares of them.
        ON_DEVICE: the process itself uses the device, and ends when that no longer works.
        REPEATS, TIMEOUT: optional; timed calls and seconds, where the usual ones do not fit.
    """

    Case: type
    CEILINGS: tuple[str, ...]
    ON_DEVICE: bool

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the family's own options."""

    def plan(self, options: Namespace) -> list[tuple[object, list[Work]]]:
        """Return the cases that the options ask for, each with its measurements in order.

        Raises:
            ValueError: the options ask for what cannot be; the text names the option.
        """

    def prepare(self, case, device: torch.device, settings: Settings) -> Measurer:
        """Return what measures a case."""


def load(family: str) -> Family:
    """Return the module of a family."""
    return import_module(f"benchmarks.{family}")
