"""Log of the chosen implementations, one line each or one table per model."""

import contextlib
import logging
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_dsa.ops.dispatch.packages import BROKEN, Reason
from megatron_dsa.ops.dispatch.policy import FLAG, VARIABLE, Policy
from megatron_dsa.ops.dispatch.support import Candidate

logger = logging.getLogger("megatron_dsa.ops.dispatch")

NO_GPU = "no GPU: torch runs everything"
_NEVER_RUN = "compiled for this GPU, not run on one"
_logged: set[str] = set()


@dataclass(frozen=True)
class Choice:
    """Implementation that runs a call, and reasons against preferred implementations.

    ``never_run``: the candidate was only compiled for this GPU. ``no_gpu``: torch runs because
    there is no GPU.
    """

    operation: str
    candidate: Candidate
    rejected: tuple[tuple[str, Reason], ...] = ()
    named: bool = False
    never_run: bool = False
    no_gpu: bool = False

    @property
    def is_fallback(self) -> bool:
        return not self.candidate.fused and not self.named

    def remark(self) -> str:
        """Explain the choice in one clause, empty for a fused candidate tested on this GPU."""
        if self.never_run:
            return _NEVER_RUN
        if self.named:
            return f"named by {FLAG} or {VARIABLE}"
        if self.no_gpu:
            return "no GPU"
        if self.candidate.fused or not self.rejected:
            return ""
        name, reason = self.rejected[0]
        return textwrap.shorten(f"{name}: {reason.short}", 64, placeholder=" ...")

    def summary(self) -> str:
        remark = self.remark()
        return f"{self.operation}: {self.candidate.name}" + (f" ({remark})" if remark else "")

    def describe(self) -> str:
        remark = f", {_NEVER_RUN}" if self.never_run else ""
        line = f"{self.operation}: {self.candidate.name}{remark}"
        return f"{line} (rejected: {listed(self.rejected)})" if self.rejected else line


def listed(rejected: tuple[tuple[str, Reason], ...]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in rejected)


collected: list[Choice] | None = None


@contextlib.contextmanager
def collect_choices() -> Iterator[list[Choice]]:
    """Collect distinct implementation choices for a table; log only fallbacks."""
    global collected
    before, collected = collected, []
    try:
        yield collected
    finally:
        collected = before


def choices_are_collected() -> bool:
    return collected is not None


def log_all_candidates() -> None:
    # The root logger's level does not filter the package's records.
    logger.setLevel(logging.DEBUG)


@contextlib.contextmanager
def choices_unlogged() -> Iterator[None]:
    """Log only errors, since a table of choices replaces the log."""
    package = logging.getLogger("megatron_dsa")
    level = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(level)


def log_choice(choice: Choice, policy: Policy) -> None:
    package = choice.candidate.support.package
    if package is not None and (untested := package.untested()):
        log_once(logging.WARNING, untested)
    for _, reason in choice.rejected:
        if reason.short.startswith(BROKEN):
            log_once(logging.WARNING, reason)
    # A fallback that the user did not request must be visible at default log levels.
    level = logging.WARNING if policy.fused and choice.is_fallback else logging.INFO
    if choice.no_gpu:
        log_once(logging.DEBUG if choices_are_collected() else level, NO_GPU)
        level = logging.DEBUG
    elif level == logging.INFO and choices_are_collected():
        level = logging.DEBUG
    in_full = logger.isEnabledFor(logging.DEBUG)
    log_once(level, choice.describe() if in_full else choice.summary())


def log_once(level: int, line: str) -> None:
    if line in _logged:
        return
    _logged.add(line)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.log(level, line)
