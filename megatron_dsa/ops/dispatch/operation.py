"""Operations: describe a call, choose a candidate, run it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from megatron_dsa.errors import ConfigError, FallbackError, ImplementationError
from megatron_dsa.ops.dispatch.choice_log import Choice, collect, listed, log_choice, log_once
from megatron_dsa.ops.dispatch.counts import measured, uncounted
from megatron_dsa.ops.dispatch.gpus import of_device
from megatron_dsa.ops.dispatch.packages import Reason
from megatron_dsa.ops.dispatch.policy import (
    FLAG,
    VARIABLE,
    Policy,
    check_environment,
    check_operations,
)
from megatron_dsa.ops.dispatch.support import Candidate, OpCall, import_attribute


@dataclass(frozen=True)
class First:
    """Calls for which one candidate is tried before the others: a benchmark shows it the fastest.

    Attributes:
        name: of the candidate.
        heads: inclusive range.
        teacher: only calls that also return the head sum of the probabilities.
    """

    name: str
    heads: tuple[int, int]
    teacher: bool = False

    def holds(self, call: OpCall) -> bool:
        """Whether ``call`` is one of them."""
        low, high = self.heads
        return low <= call.heads <= high and (call.teacher or not self.teacher)


#: Device and compute capability that a plan describes calls for, in place of the real ones.
_planned_for: tuple[str, tuple[int, int] | None] | None = None
#: Fakes of torch's candidates run without a choice: sizes may be symbols.
_unchosen = False


@contextlib.contextmanager
def meta_dispatch(capability: tuple[int, int] | None, choose: bool = True) -> Iterator[None]:
    """Choose for a GPU of that compute capability (``None``: the CPU), and run fakes.

    Nothing is counted or logged: the GPU is not there. ``choose=False``: run the fakes of torch's
    candidates, whatever the policy names.
    """
    global _planned_for, _unchosen
    before = _planned_for, _unchosen
    _planned_for, _unchosen = ("cpu" if capability is None else "cuda", capability), not choose
    try:
        with uncounted():
            yield
    finally:
        _planned_for, _unchosen = before


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
    """Build an :class:`OpCall` with the compute capability of ``device``."""
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
        title: one phrase for tables.
        candidates: the implementations in the order in which they are tried, torch's last.
        fake: ``"module:function"`` called with a candidate and the arguments of the
            implementations; it returns, keeps and allocates on the meta device what the candidate
            would (:func:`meta_dispatch`).
        first: exceptions from that order; the first rule that holds counts.
    """

    name: str
    title: str
    candidates: tuple[Candidate, ...]
    fake: str = ""
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
        """Choose the candidate that runs ``call`` under ``policy``.

        Raises:
            ImplementationError: an implementation was named that cannot run here.
            FallbackError: the policy is strict, prefers fused implementations and none can run.
            ConfigError: an implementation was named that does not exist.
        """
        choice = _choose(self, call, policy, logged=not on_meta())
        collect(choice)
        return choice

    def why_not_fused(self, call: OpCall, policy: Policy) -> str | None:
        """Return why no fused implementation that ran on such a GPU takes ``call``, or ``None``.

        Nothing is logged and no fallback is refused: the caller may use another operation.

        Raises:
            ImplementationError, ConfigError: as :meth:`choose`, for a named implementation.
        """
        choice = _choose(self, call, replace(policy, strict=False), logged=False)
        if choice.candidate.fused and not choice.never_run:
            return None
        return choice.remark() or "torch was asked for"

    def run(self, call: OpCall, policy: Policy, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation that :meth:`choose` picks, and count the call."""
        candidate = self.candidates[-1] if _unchosen else self.choose(call, policy).candidate
        if on_meta():
            return import_attribute(self.fake)(candidate, *args, **kwargs)
        with measured(self.name, candidate.name, call.device == "cuda"):
            return candidate.load()(*args, **kwargs)


def forget_choices() -> None:
    """Choose anew from now on: candidates have changed."""
    _choose.cache_clear()


@lru_cache(maxsize=512)
def _choose(operation: Operation, call: OpCall, policy: Policy, logged: bool) -> Choice:
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
    if choice.candidate.support.never_run(call):
        choice = replace(choice, never_run=True)
    if logged:
        log_choice(choice, policy, call)
    return choice


def _require_candidate(operation: Operation, name: str) -> str:
    """Return the flag in words, for messages about the candidate of that name."""
    known = [candidate.name for candidate in operation.candidates]
    asked = f"{FLAG} ({VARIABLE}) {operation.name}={name}"
    if name not in ("auto", *known):
        raise ConfigError(f"{asked}: must be auto or one of {', '.join(known)}")
    return asked


def _choose_named(operation: Operation, call: OpCall, name: str) -> Choice:
    asked = _require_candidate(operation, name)
    candidate = next(c for c in operation.candidates if c.name == name)
    reason = candidate.reason(call)
    if reason is not None:
        raise ImplementationError(
            f"{asked}: it cannot run here: {reason}. Fix that, or leave the operation out to take "
            "what can run."
        )
    return Choice(operation.name, candidate, named=True)


def _choose_first(operation: Operation, call: OpCall, policy: Policy) -> Choice:
    usable, rejected = operation.ranked(call), []
    if not policy.fused:
        unwanted = Reason("not asked for: dsa_unfused is torch")
        rejected += [(c.name, unwanted) for c in usable if c.fused]
        usable = [c for c in usable if not c.fused]
    elif not any(c.fused for c in usable):
        rejected.append(("fused", Reason("no fused implementation exists in this release")))
    for candidate in usable:
        reason = candidate.reason(call)
        if reason is None:
            choice = Choice(operation.name, candidate, tuple(rejected))
            break
        rejected.append((candidate.name, reason))
    else:
        listing = listed(tuple(rejected))
        raise FallbackError(f"no implementation of {operation.name} can run here: {listing}")
    if policy.fused and policy.strict and choice.is_fallback:
        raise FallbackError(
            f"--dsa-strict refuses the fallback of {choice.describe()}. Fix one of the reasons, "
            f"name it ({FLAG} {operation.name}={choice.candidate.name}), or drop --dsa-strict."
        )
    return choice
