"""Operations: a call is described, one of the candidates is chosen and run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from megatron_dsa.errors import ConfigError, FallbackError, ImplementationError
from megatron_dsa.ops.dispatch.choice_log import log_choice, log_once
from megatron_dsa.ops.dispatch.counts import TIMES, count, profiler_range, uncounted
from megatron_dsa.ops.dispatch.gpus import of_device
from megatron_dsa.ops.dispatch.policy import (
    FLAG,
    VARIABLE,
    Policy,
    check_environment,
    check_operations,
)
from megatron_dsa.ops.dispatch.support import OpCall, Support

#: Characters of a reason in a line that gives one.
_SHORT = 64


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operation.

    Attributes:
        name: short name used in flags, logs and reports.
        kernel: ``"module:attribute"`` of the callable. The module is imported when it is first
            called: it may need an optional package.
        support: what it can run.
        fused: whether it is a fused kernel (``False``: the torch fallback).
    """

    name: str
    kernel: str
    support: Support
    fused: bool = True

    def reason(self, call: OpCall) -> str | None:
        """Return why it cannot run ``call``, or ``None``."""
        return self.support.reason(call)

    def load(self) -> Callable:
        """Return the callable; a class is called without arguments for it."""
        found = import_attribute(self.kernel)
        return found() if isinstance(found, type) else found


def import_attribute(path: str) -> Any:
    """Import ``"module:attribute"``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class First:
    """Calls for which one candidate is tried before the others: a benchmark shows it the fastest.

    Attributes:
        name: of the candidate.
        heads: inclusive range.
        teacher: only calls that want the head sum of the probabilities, too.
    """

    name: str
    heads: tuple[int, int]
    teacher: bool = False

    def holds(self, call: OpCall) -> bool:
        """Whether ``call`` is one of them."""
        low, high = self.heads
        return low <= call.heads <= high and (call.teacher or not self.teacher)


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a call, and why the others were not.

    ``never_run`` says that its kernels never ran on such a GPU.
    """

    operation: str
    candidate: Candidate
    rejected: tuple[tuple[str, str], ...] = field(default=())
    named: bool = False
    never_run: bool = False

    @property
    def is_fallback(self) -> bool:
        """Whether torch runs without being named."""
        return not self.candidate.fused and not self.named

    def remark(self) -> str:
        """Why this one, in one clause; empty for a fused candidate that was run on such a GPU."""
        if self.never_run:
            return "compiled for this GPU, not run on one"
        if self.named:
            return f"named by {FLAG} or {VARIABLE}"
        if self.candidate.fused or not self.rejected:
            return ""
        # What is declined is never used anywhere: it tells least.
        used = (entry for entry in self.rejected if not entry[1].startswith("declined"))
        name, reason = next(used, self.rejected[0])
        # Reasons begin with what is wrong; what would be needed and how to get it follow.
        clause = re.split(r"[;,] | \(", reason)[0]
        return textwrap.shorten(f"{name}: {clause}", _SHORT, placeholder=" ...")

    def summary(self) -> str:
        """One short line: what runs, and why the first candidate does not if torch does."""
        remark = self.remark()
        return f"{self.operation}: {self.candidate.name}" + (f" ({remark})" if remark else "")

    def describe(self) -> str:
        """One line: what runs and why nothing better does, all rejected candidates."""
        reasons = "; ".join(f"{name}: {why}" for name, why in self.rejected)
        remark = ", compiled for this GPU, not run on one" if self.never_run else ""
        line = f"{self.operation}: {self.candidate.name}{remark}"
        return f"{line} (rejected: {reasons})" if reasons else line


#: What :func:`collect_choices` gives, while it lasts.
_collected: list[Choice] | None = None
#: Device and compute capability that a plan describes calls for, in place of the real ones.
_planned_for: tuple[str, tuple[int, int] | None] | None = None


@contextlib.contextmanager
def meta_dispatch(capability: tuple[int, int] | None) -> Iterator[None]:
    """Choose for a GPU of that compute capability (``None``: the CPU), and run meta functions.

    Nothing is counted and no choice is logged, for the GPU is not there.
    """
    global _planned_for
    before, _planned_for = _planned_for, ("cpu" if capability is None else "cuda", capability)
    try:
        with uncounted():
            yield
    finally:
        _planned_for = before


def on_meta() -> bool:
    """Whether :func:`meta_dispatch` is in force: implementations are chosen and do not run."""
    return _planned_for is not None


def deterministic_mode() -> bool:
    """Whether torch's deterministic mode is in force, and not only for warnings."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def describe_call(device: torch.device | str, **properties) -> OpCall:
    """Build a :class:`OpCall`, reading the compute capability off ``device``."""
    properties.setdefault("deterministic", deterministic_mode())
    if _planned_for is not None:
        name, capability = _planned_for
    else:
        device = torch.device(device)
        name = device.type
        capability = of_device(torch.cuda.get_device_capability, device) if name == "cuda" else None
    return OpCall(device=name, capability=capability, **properties)


#: All operations, by name.
_declared: dict[str, Operation] = {}


@dataclass(eq=False)
class Operation:
    """An operation that has implementations to choose from.

    Attributes:
        name: used in flags, logs, reports and profiler ranges.
        title: what it does.
        candidates: the implementations in the order in which they are tried, torch's last.
        first: exceptions from that order; the first rule that holds counts.
        meta: ``"module:function"`` of its meta function: called with a candidate and the arguments
            of the implementations, it returns, keeps and allocates on the meta device what the
            candidate would (:func:`meta_dispatch`).
    """

    name: str
    title: str
    candidates: tuple[Candidate, ...]
    meta: str
    first: tuple[First, ...] = ()

    def __post_init__(self):
        if self.name in _declared:
            raise ValueError(f"{self.name}: an operation has this name already")
        self._check(self.candidates)
        _declared[self.name] = self

    def _check(self, candidates: tuple[Candidate, ...]) -> None:
        names = [candidate.name for candidate in candidates]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: two of {', '.join(names)} have the same name")
        if [c.fused for c in candidates] != [True] * (len(names) - 1) + [False]:
            raise ValueError(f"{self.name}: one implementation must be torch's, the last one")
        unknown = {rule.name for rule in self.first} - set(names)
        if unknown:
            raise ValueError(f"{self.name}: first names {unknown}, candidates are {names}")

    def add(self, candidate: Candidate) -> None:
        """Add a fused implementation of a user's own, tried after the other fused ones.

        Raises:
            ValueError: its name is taken, or it is not fused.
        """
        candidates = (*self.candidates[:-1], candidate, self.candidates[-1])
        self._check(candidates)
        self.candidates = candidates
        forget_choices()

    def ranked(self, call: OpCall) -> list[Candidate]:
        """Return the candidates in the order in which they are tried for ``call``.

        Kernels that were never run on such a GPU are not moved to the front.
        """
        name = next((rule.name for rule in self.first if rule.holds(call)), None)
        return sorted(self.candidates, key=lambda c: c.name != name or c.support.never_run(call))

    def choose(self, call: OpCall, policy: Policy) -> Choice:
        """Return what runs ``call`` under ``policy``.

        Raises:
            ImplementationError: an implementation was named that cannot run here.
            FallbackError: the policy is strict, prefers fused implementations and none can run.
            ConfigError: an implementation was named that does not exist.
        """
        # What is chosen for a plan is not logged: its GPU is not there.
        choice = _choose(self, call, policy, planned=on_meta())
        if _collected is not None and choice not in _collected:
            _collected.append(choice)
        return choice

    def why_not_fused(self, call: OpCall, policy: Policy) -> str | None:
        """Return why no fused implementation that was run on such a GPU would run ``call``.

        ``None``: one would. Nothing is logged and no fallback is refused: who asks may call another
        operation instead.

        Raises:
            ImplementationError, ConfigError: as :meth:`choose`, for a named implementation.
        """
        choice = _choose(self, call, replace(policy, strict=False), planned=True)
        if choice.candidate.fused and not choice.never_run:
            return None
        return choice.remark() or "torch was asked for"

    def run(self, call: OpCall, policy: Policy, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation that :meth:`choose` picks, and count the call."""
        candidate = self.choose(call, policy).candidate
        if on_meta():
            return import_attribute(self.meta)(candidate, *args, **kwargs)
        count(self.name, candidate.name)
        on_gpu = call.device == "cuda"
        with profiler_range(f"megatron_dsa.{self.name}.{candidate.name}", on_gpu):
            if not TIMES.on:
                return candidate.load()(*args, **kwargs)
            with TIMES.measure(self.name, on_gpu):
                return candidate.load()(*args, **kwargs)


@lru_cache(maxsize=512)
def _choose(operation: Operation, call: OpCall, policy: Policy, planned: bool) -> Choice:
    for name, implementation in policy.named:
        check_operations([name], _declared, "Policy.named")
        _require_candidate(_declared[name], implementation)
    named = policy.named_for(operation.name)
    for warning in check_environment(_declared):
        log_once(logging.WARNING, warning)
    if named is not None:
        choice = _choose_named(operation, call, named)
    else:
        choice = _choose_first(operation, call, policy)
    if not planned:
        log_choice(choice, policy, call, in_table=choices_are_collected())
    return choice


@contextlib.contextmanager
def collect_choices() -> Iterator[list[Choice]]:
    """Collect the choices made inside, each once, for a table; only fallbacks log a line, too."""
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


def choices_are_collected() -> bool:
    """Whether a table will say what is chosen now."""
    return _collected is not None


def forget_choices() -> None:
    """Choose anew from now on: candidates have changed."""
    _choose.cache_clear()


def _require_candidate(operation: Operation, name: str) -> None:
    known = [candidate.name for candidate in operation.candidates]
    if name not in ("auto", *known):
        asked = f"{FLAG} ({VARIABLE}) {operation.name}={name}"
        raise ConfigError(f"{asked}: must be auto or one of {', '.join(known)}")


def _choose_named(operation: Operation, call: OpCall, name: str) -> Choice:
    _require_candidate(operation, name)
    asked = f"{FLAG} ({VARIABLE}) {operation.name}={name}"
    known = {candidate.name: candidate for candidate in operation.candidates}
    reason = known[name].reason(call)
    if reason is not None:
        raise ImplementationError(
            f"{asked}: it cannot run here: {reason}. Fix that, or leave the operation out to take "
            "what can run."
        )
    never_run = known[name].support.never_run(call)
    return Choice(operation.name, known[name], named=True, never_run=never_run)


def _choose_first(operation: Operation, call: OpCall, policy: Policy) -> Choice:
    usable = operation.ranked(call)
    rejected = []
    if not policy.fused:
        rejected += [(c.name, "not asked for: dsa_unfused is torch") for c in usable if c.fused]
        usable = [c for c in usable if not c.fused]
    elif not any(c.fused for c in usable):
        rejected.append(("fused", "no fused implementation exists in this release"))
    for candidate in usable:
        reason = candidate.reason(call)
        if reason is None:
            never_run = candidate.support.never_run(call)
            choice = Choice(operation.name, candidate, tuple(rejected), never_run=never_run)
            break
        rejected.append((candidate.name, reason))
    else:
        listing = "; ".join(f"{name}: {why}" for name, why in rejected)
        raise FallbackError(f"no implementation of {operation.name} can run here: {listing}")
    if policy.fused and policy.strict and choice.is_fallback:
        raise FallbackError(
            f"--dsa-strict refuses the fallback of {choice.describe()}. Fix one of the reasons, "
            f"name it ({FLAG} {operation.name}={choice.candidate.name}), or drop --dsa-strict."
        )
    return choice
