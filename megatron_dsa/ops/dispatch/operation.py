"""Operations: describe a call, choose a candidate, run it, count it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from megatron_dsa.errors import ConfigError, FallbackError, ImplementationError
from megatron_dsa.ops.dispatch import choice_log
from megatron_dsa.ops.dispatch.choice_log import Choice, listed, log_choice, log_once
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
    """Calls for which the candidate ``name`` was fastest in a benchmark.

    ``teacher`` limits the rule to calls that return the head sum of the probabilities.
    """

    name: str
    heads: tuple[int, int]
    teacher: bool = False

    def holds(self, call: OpCall) -> bool:
        low, high = self.heads
        return low <= call.heads <= high and (call.teacher or not self.teacher)


_calls: Counter[tuple[str, str]] = Counter()
_counting = True


def count(what: str, name: str) -> None:
    if _counting:
        _calls[what, name] += 1


def report() -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for (operation, name), calls in sorted(_calls.items()):
        counts.setdefault(operation, {})[name] = calls
    return counts


def reset_report() -> None:
    _calls.clear()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before


class OperationTimes:
    """Time per operation (``--dsa-time-operations``), excluding nested operations.

    CUDA events measure it without synchronisation. Backwards that autograd runs outside dispatch,
    and evaluation (``paused``), are not measured.
    """

    def __init__(self):
        self.on = self.paused = False
        self._done: list[tuple[str, str | None, Any, Any]] = []
        self._running = threading.local()  # autograd runs the backward in separate threads

    @contextlib.contextmanager
    def measure(self, operation: str, cuda: bool) -> Iterator[None]:
        if not self.on or self.paused:
            yield
            return
        running = self._running.__dict__.setdefault("operations", [])
        around = running[-1] if running else None
        running.append(operation)
        begin = _now(cuda)
        try:
            yield
        finally:
            running.pop()
            self._done.append((operation, around, begin, _now(cuda)))

    def take(self) -> dict[str, float]:
        """Wait for the GPU and return seconds per operation since the last ``take``."""
        done, self._done = self._done, []
        seconds: defaultdict[str, float] = defaultdict(float)
        for operation, around, begin, end in done:
            if isinstance(end, float):
                elapsed = end - begin
            else:
                end.synchronize()
                elapsed = begin.elapsed_time(end) / 1e3
            seconds[operation] += elapsed
            if around is not None:
                seconds[around] -= elapsed
        return dict(seconds)


def _now(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


TIMES = OperationTimes()


#: Device and compute capability that a plan assumes, or ``None`` outside a plan.
_planned_for: tuple[str, tuple[int, int] | None] | None = None
#: Always run torch's fake kernel, since symbolic sizes do not allow a choice.
_unchosen = False


@contextlib.contextmanager
def meta_dispatch(capability: tuple[int, int] | None, choose: bool = True) -> Iterator[None]:
    """Run fake kernels, chosen for a GPU's compute capability or, for ``None``, the CPU.

    Calls are neither counted nor logged. With ``choose=False`` all fake kernels are torch's.
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
    return _planned_for is not None


def deterministic_mode() -> bool:
    """Return whether torch's deterministic mode is on and raises instead of warning."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def describe_call(device: torch.device | str, **properties) -> OpCall:
    properties.setdefault("deterministic", deterministic_mode())
    if _planned_for is not None:  # symbolic sizes cannot be cache keys
        return OpCall(*_planned_for, **properties)
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    capability = of_device(torch.cuda.get_device_capability, device) if on_gpu else None
    return _known_call(device.type, capability, **properties)


#: Equal calls share one object, so cache lookups compare no fields.
_known_call = lru_cache(maxsize=512)(OpCall)


_declared: dict[str, Operation] = {}


@dataclass(eq=False)
class Operation:
    """Operation with implementations to choose from.

    Attributes:
        name: used in flags, logs, reports and profiler ranges.
        candidates: implementations in order of preference, torch last.
        fake: ``"module:function"``, called with a candidate and its arguments on the meta device;
            it returns, saves and allocates tensors like the candidate.
        first: exceptions to that order; the first matching rule applies.
    """

    name: str
    title: str
    candidates: tuple[Candidate, ...]
    fake: str
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
        """Add a user's fused implementation after all fused implementations.

        Raises:
            ValueError: the name exists, or the candidate is not fused.
        """
        candidates = (*self.candidates[:-1], candidate, self.candidates[-1])
        self._check(candidates)
        self.candidates = candidates
        forget_choices()

    def ranked(self, call: OpCall) -> list[Candidate]:
        name = next((rule.name for rule in self.first if rule.holds(call)), None)
        # Benchmark rules do not promote kernels that were never run on this GPU.
        return sorted(
            self.candidates,
            key=lambda c: c.name != name or call.capability in c.support.not_run,
        )

    def choose(self, call: OpCall, policy: Policy) -> Choice:
        """Choose the candidate that runs ``call`` under ``policy``.

        Raises:
            ImplementationError: the named implementation cannot run here.
            FallbackError: the policy is fused and strict, and no fused implementation can run.
            ConfigError: the named implementation does not exist.
        """
        choice = _choose(self, call, policy, logged=not on_meta())
        collected = choice_log.collected
        if collected is not None and choice not in collected:
            collected.append(choice)
        return choice

    def why_not_fused(self, call: OpCall, policy: Policy) -> str | None:
        """Return why no fused implementation tested on this GPU supports ``call``, or ``None``.

        Fallbacks are neither logged nor refused.
        """
        choice = _choose(self, call, replace(policy, strict=False), logged=False)
        if choice.candidate.fused and not choice.never_run:
            return None
        return choice.remark() or "torch was asked for"

    def run(self, call: OpCall, policy: Policy, *args: Any, **kwargs: Any) -> Any:
        candidate = self.candidates[-1] if _unchosen else self.choose(call, policy).candidate
        if _planned_for is not None:
            return import_attribute(self.fake)(candidate, *args, **kwargs)
        count(self.name, candidate.name)
        # Avoid record_function without a profiler or timer, because each range costs host time.
        on_gpu, label = call.device == "cuda", f"megatron_dsa.{self.name}.{candidate.name}"
        if on_gpu:
            torch.cuda.nvtx.range_push(label)
        try:
            if not (TIMES.on or torch.autograd._profiler_enabled()):
                return candidate.load()(*args, **kwargs)
            with torch.profiler.record_function(label), TIMES.measure(self.name, on_gpu):
                return candidate.load()(*args, **kwargs)
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()


def forget_choices() -> None:
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
    if call.capability in choice.candidate.support.not_run:
        choice = replace(choice, never_run=True)
    if policy.fused and choice.is_fallback and call.device == "cpu":
        choice = replace(choice, no_gpu=not torch.cuda.is_available())
    if logged:
        log_choice(choice, policy)
    return choice


def _require_candidate(operation: Operation, name: str) -> str:
    known = [candidate.name for candidate in operation.candidates]
    asked = f"{FLAG} ({VARIABLE}) {operation.name}={name}"
    if name not in ("auto", *known):
        raise ConfigError(f"{asked}: must be auto or one of {', '.join(known)}")
    return asked


def _choose_named(operation: Operation, call: OpCall, name: str) -> Choice:
    asked = _require_candidate(operation, name)
    candidate = next(c for c in operation.candidates if c.name == name)
    if (reason := candidate.reason(call)) is not None:
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
    elif len(usable) == 1:
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
