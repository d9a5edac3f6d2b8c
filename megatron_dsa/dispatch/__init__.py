"""Choosing an implementation per operation, saying so once, and counting what really ran.

Every operation has a list of candidates (filled by ``megatron_dsa.ops``). A candidate's declaration
(:class:`~megatron_dsa.dispatch.support.Support`) answers a
:class:`~megatron_dsa.dispatch.support.Problem` with ``None`` (it can run) or with the reason why it
cannot. :func:`choose` takes the first candidate that can; fused ones come first when the policy
prefers them, and of those the one that is measured to be the fastest for the problem. Nothing falls
    back in silence: the choice and every rejection are
logged once, a strict policy raises instead, an implementation that the user names runs or raises,
and :func:`report` tells what was called how often.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from megatron_dsa.dispatch.support import Problem, Support
from megatron_dsa.dispatch.times import TIMES
from megatron_dsa.errors import ConfigError, FallbackError, ImplementationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operation:
    """An operation that has implementations to choose from.

    Attributes:
        name: used in logs, reports and profiler ranges.
        short: names its flag ``--dsa-<short>-impl`` and environment variable.
        title: what it does.
    """

    name: str
    short: str
    title: str

    @property
    def flag(self) -> str:
        return f"--dsa-{self.short}-impl"

    @property
    def variable(self) -> str:
        return f"{VARIABLES}{self.short.upper().replace('-', '_')}_IMPL"


#: The operations, in the order in which a training step calls them.
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("compressor", "compressor", "pooling of positions, forward and backward"),
        Operation("norm_rope", "norm-rope", "norm and rope of queries, forward and backward"),
        Operation("rotate", "rotate", "rope, or inverse rope, forward and backward"),
        Operation("key_lists", "lists", "lists of window and compressed keys"),
        Operation("indexer_scores", "scores", "index scores of a block of queries"),
        Operation("indexer_listed_scores", "listed-scores", "index scores of listed keys"),
        Operation("indexer_topk", "topk", "the best visible keys of a block of scores"),
        Operation("sparse_attention_forward", "forward", "sparse attention forward"),
        Operation("sparse_attention_backward", "backward", "sparse attention backward"),
        Operation(
            "sparse_attention_probabilities", "teacher", "head sum of the probabilities (teacher)"
        ),
        Operation("dense_attention", "dense", "dense causal attention, forward and backward"),
        Operation("ring_attention", "ring", "dense attention over ranks, forward and backward"),
        Operation("sparse_indexer_loss", "sparse-loss", "indexer loss over the selected keys"),
        Operation("dense_indexer_loss", "dense-loss", "indexer loss over all visible keys"),
        Operation("indexer_backward", "indexer-backward", "indexer gradients from the sparse loss"),
    )
}

#: What the names of all environment variables of this package begin with.
VARIABLES = "MEGATRON_DSA_"

DEFAULT_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Policy:
    """What the user asked for.

    Attributes:
        fused: prefer fused implementations (``--attention-backend dsa_fused``).
        strict: raise :class:`FallbackError` instead of falling back (``--dsa-strict``).
        workspace_bytes: budget for temporary memory of the implementations that need much.
        named: pairs ``(operation, implementation)`` that must run or raise
            (``--dsa-forward-impl flashmla``); they go before ``fused``.
        fp8_selection: keys are selected by fp8 scores, the best of them scored again
            (``--dsa-fp8-selection``).
        fp8_least_ratio: but only where there are at least as many times more keys than candidates.
            By measurement (``docs/indexer_kernels.md``): from there on fp8 wins what these cost.
    """

    fused: bool = True
    strict: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    named: tuple[tuple[str, str], ...] = ()
    fp8_selection: bool = False
    fp8_least_ratio: int = 12

    def named_for(self, operation: str) -> str | None:
        """Implementation named for ``operation``: by the policy, else by the environment."""
        value = dict(self.named).get(operation)
        if value is None:
            value = os.environ.get(OPERATIONS[operation].variable)
        return None if value in (None, "", "auto") else value


def deterministic_mode() -> bool:
    """Whether torch's deterministic mode is in force, and not only for warnings."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@dataclass(frozen=True)
class Rehearsal:
    """A GPU that is not there, and what stands in for kernels on it.

    Attributes:
        capability: its compute capability; ``None`` stands for a CPU.
        run: called as ``run(operation, candidate, *args, **kwargs)`` in place of the candidate.
    """

    capability: tuple[int, int] | None
    run: Callable


_rehearsal: Rehearsal | None = None


@contextlib.contextmanager
def rehearse(rehearsal: Rehearsal):
    """Choose for that GPU and run the stand-ins, while it lasts
    (:mod:`megatron_dsa.tools.planner`).

    What was chosen is not logged, and chosen anew by who runs it: probes answer without a GPU here.
    """
    global _rehearsal
    before, _rehearsal = _rehearsal, rehearsal
    try:
        yield
    finally:
        _rehearsal = before
        _choose.cache_clear()


def rehearsing() -> bool:
    """Whether nothing is to be run on a GPU: kernels are chosen and not called."""
    return _rehearsal is not None


def device_problem(device: torch.device | str, **properties) -> Problem:
    """Build a :class:`Problem`, reading the compute capability off ``device``."""
    properties.setdefault("deterministic", deterministic_mode())
    if _rehearsal is not None:
        name = "cpu" if _rehearsal.capability is None else "cuda"
        return Problem(device=name, capability=_rehearsal.capability, **properties)
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Problem(device=device.type, capability=capability, **properties)


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operation.

    Attributes:
        name: short name used in flags, logs and reports.
        fused: whether it is a fused kernel (``False``: the torch fallback).
        support: what it can run.
        load: returns the callable; imports optional packages only when called.
    """

    name: str
    fused: bool
    support: Support
    load: Callable[[], Callable]

    def reason(self, problem: Problem) -> str | None:
        """Return why it cannot run ``problem``, or ``None``."""
        return self.support.reason(problem)


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a problem, and why the others were not.

    ``untried`` says that its kernels never ran on such a GPU.
    """

    operation: str
    candidate: Candidate
    rejected: tuple[tuple[str, str], ...] = field(default=())
    named: bool = False
    untried: bool = False

    @property
    def is_fallback(self) -> bool:
        return not self.candidate.fused and not self.named

    def describe(self) -> str:
        """One line: what runs and why nothing better does."""
        reasons = "; ".join(f"{name}: {why}" for name, why in self.rejected)
        remark = ", compiled for this GPU, not run on one" if self.untried else ""
        line = f"{self.operation}: {self.candidate.name}{remark}"
        return f"{line} (rejected: {reasons})" if reasons else line


_candidates: dict[str, list[Candidate]] = {operation: [] for operation in OPERATIONS}
_calls: Counter[tuple[str, str]] = Counter()
_counting = True
_logged: set[str] = set()


def register(operation: str, candidate: Candidate) -> None:
    """Add a candidate; fused ones are tried as added, after those that lead for the problem."""
    _candidates[operation].append(candidate)


def candidates(operation: str) -> list[Candidate]:
    """Return the candidates of an operation in the order in which they are declared, torch last."""
    import megatron_dsa.ops  # noqa: F401  (registers the candidates)

    return sorted(_candidates[operation], key=lambda candidate: not candidate.fused)


def choose(operation: str, problem: Problem, policy: Policy) -> Choice:
    """Return what runs ``operation`` for ``problem`` under ``policy``.

    Raises:
        ImplementationError: an implementation was named that cannot run here.
        FallbackError: the policy is strict, prefers fused implementations and none can run.
        ConfigError: an implementation was named that does not exist.
    """
    return _choose(operation, problem, policy, policy.named_for(operation))


@lru_cache(maxsize=512)
def _choose(operation: str, problem: Problem, policy: Policy, named: str | None) -> Choice:
    _check_variables()
    if named is not None:
        choice = _choose_named(operation, problem, named)
    else:
        choice = _choose_first(operation, problem, policy)
    if _rehearsal is None:
        _log_once(choice, policy, problem)
    return choice


def _choose_named(operation: str, problem: Problem, name: str) -> Choice:
    flags = f"{OPERATIONS[operation].flag} ({OPERATIONS[operation].variable})"
    known = {candidate.name: candidate for candidate in candidates(operation)}
    if name not in known:
        raise ConfigError(f"{flags} must be auto or one of {', '.join(known)}, got {name!r}")
    reason = known[name].reason(problem)
    if reason is not None:
        raise ImplementationError(
            f"{flags} names {name}, which cannot run {operation} here: {reason}. Fix that, or "
            "leave it at auto to take what can run."
        )
    untried = known[name].support.untried(problem)
    return Choice(operation, known[name], named=True, untried=untried)


def _choose_first(operation: str, problem: Problem, policy: Policy) -> Choice:
    usable = sorted(candidates(operation), key=lambda c: not c.support.leads(problem))
    rejected = []
    if not policy.fused:
        rejected += [(c.name, "not asked for (dsa_unfused)") for c in usable if c.fused]
        usable = [c for c in usable if not c.fused]
    elif not any(c.fused for c in usable):
        rejected.append(("fused", "no fused implementation exists in this release"))
    for candidate in usable:
        reason = candidate.reason(problem)
        if reason is None:
            untried = candidate.support.untried(problem)
            choice = Choice(operation, candidate, tuple(rejected), untried=untried)
            break
        rejected.append((candidate.name, reason))
    else:
        listing = "; ".join(f"{name}: {why}" for name, why in rejected)
        raise FallbackError(f"no implementation of {operation} can run here: {listing}")
    if policy.fused and policy.strict and choice.is_fallback:
        raise FallbackError(
            f"--dsa-strict refuses the fallback of {choice.describe()}. Fix one of the reasons, "
            f"name it ({OPERATIONS[operation].flag} {choice.candidate.name}), or drop --dsa-strict."
        )
    return choice


def _check_variables() -> None:
    """Name environment variables that look like ours and are not read.

    Raises:
        ConfigError: one is meant to name an implementation. Others are a warning: a variable of
            the user's own may begin like that.
    """
    known = [operation.variable for operation in OPERATIONS.values()]
    for name in sorted(os.environ):
        if not name.upper().startswith(VARIABLES) or name in known:
            continue
        close = difflib.get_close_matches(name.upper(), known, n=3, cutoff=0.5)
        line = (
            f"environment variable {name}: megatron_dsa does not read it; the closest that it "
            f"reads: {', '.join(close)}"
        )
        if name.upper().endswith("_IMPL"):
            raise ConfigError(f"{line}. Correct the name or unset it")
        _log(logging.WARNING, line)


def _log_once(choice: Choice, policy: Policy, problem: Problem) -> None:
    package = choice.candidate.support.package
    remark = package.untested() if package is not None else None
    if remark is not None:
        _log(logging.WARNING, remark)
    # A fallback that nobody asked for is a warning: it must show at default log levels.
    level = logging.WARNING if policy.fused and choice.is_fallback else logging.INFO
    if level == logging.WARNING and _without_gpu(problem):
        # The same reason for every operation: one line says it.
        _log(level, "no GPU: torch runs everything")
        level = logging.DEBUG
    _log(level, choice.describe())


def _without_gpu(problem: Problem) -> bool:
    """Whether the machine has no GPU; tensors on the CPU beside one are another matter."""
    return problem.device == "cpu" and not torch.cuda.is_available()


def _log(level: int, line: str) -> None:
    if line in _logged:
        return
    _logged.add(line)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.log(level, "megatron_dsa %s", line)


def run(operation: str, problem: Problem, policy: Policy, *args, **kwargs):
    """Run ``operation`` with the implementation that :func:`choose` picks, and count the call."""
    candidate = choose(operation, problem, policy).candidate
    if _rehearsal is not None:
        return _rehearsal.run(operation, candidate, *args, **kwargs)
    count(operation, candidate.name)
    on_gpu = problem.device == "cuda"
    with (
        _range(f"megatron_dsa.{operation}.{candidate.name}", on_gpu),
        TIMES.measure(operation, on_gpu),
    ):
        return candidate.load()(*args, **kwargs)


def count(what: str, name: str) -> None:
    """Let :func:`report` tell that ``what`` was done by way of ``name``."""
    if _counting and _rehearsal is None:
        _calls[what, name] += 1


@contextlib.contextmanager
def _range(name: str, nvtx: bool):
    """A range of that name in torch's profiler and, on a GPU, in NVTX (Nsight Systems)."""
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def report() -> dict[str, dict[str, int]]:
    """Return how often each implementation of each operation ran in this process."""
    counts: dict[str, dict[str, int]] = {}
    for (operation, name), count in sorted(_calls.items()):
        counts.setdefault(operation, {})[name] = count
    return counts


def reset_report() -> None:
    """Set the counts of :func:`report` back to zero."""
    _calls.clear()


@contextlib.contextmanager
def uncounted():
    """Calls inside do not show in :func:`report` (warm-up is not the run)."""
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before
