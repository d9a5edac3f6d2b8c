"""Choosing an implementation per operation, saying so once, and counting what really ran.

Every operation has a list of candidates (:data:`CANDIDATES`, filled by ``megatron_dsa.ops``). A
candidate looks at a :class:`Problem` and answers with ``None`` (it can run) or with the reason why
it cannot. :func:`choose` takes the first candidate that can; fused ones come first when the policy
prefers them. Nothing falls back in silence: the choice and every rejection are logged once, a
strict policy raises instead, and :func:`report` tells what was called how often.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from megatron_dsa.errors import FallbackError

logger = logging.getLogger(__name__)

#: Names of the operations, in the order in which a training step calls them.
OPERATIONS = (
    "indexer_topk",
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
    "dense_attention",
    "sparse_indexer_loss",
    "dense_indexer_loss",
)

DEFAULT_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Policy:
    """What the user asked for.

    Attributes:
        fused: prefer fused implementations (``--attention-backend dsa_fused``).
        strict: raise :class:`FallbackError` instead of falling back (``--dsa-strict``).
        workspace_bytes: budget for temporary memory of the unfused implementations.
    """

    fused: bool = True
    strict: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES


@dataclass(frozen=True)
class Problem:
    """The properties of a call that decide which implementation can take it.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        capability: compute capability of the GPU, e.g. ``(9, 0)``; ``None`` without one.
        dtype: dtype of queries and keys.
        heads: local query heads.
        qk_dim, v_dim: dims of a query/key and of a value.
        topk: keys selected per query; ``None`` where nothing is selected.
        packed: sequences of different lengths share the batch.
        sink: a learned sink takes part in the softmax.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    heads: int
    qk_dim: int
    v_dim: int
    topk: int | None = None
    packed: bool = False
    sink: bool = False

    def on(self) -> str:
        """Return the device in words, for messages."""
        if self.capability is None:
            return "the CPU"
        return "a GPU of compute capability {}.{}".format(*self.capability)


def device_problem(device: torch.device | str, **properties) -> Problem:
    """Build a :class:`Problem`, reading the compute capability off ``device``."""
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Problem(device=device.type, capability=capability, **properties)


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operation.

    Attributes:
        name: short name used in flags, logs and reports.
        fused: whether it is a fused kernel (``False``: the torch fallback).
        unsupported: ``Problem -> str | None``, the reason why it cannot run, or ``None``.
        load: returns the callable; imports optional packages only when called.
    """

    name: str
    fused: bool
    unsupported: Callable[[Problem], str | None]
    load: Callable[[], Callable]


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a problem, and why the others were not."""

    operation: str
    candidate: Candidate
    rejected: tuple[tuple[str, str], ...] = field(default=())

    @property
    def is_fallback(self) -> bool:
        return not self.candidate.fused

    def describe(self) -> str:
        """One line: what runs and why nothing better does."""
        reasons = "; ".join(f"{name}: {why}" for name, why in self.rejected)
        line = f"{self.operation}: {self.candidate.name}"
        return f"{line} (rejected: {reasons})" if reasons else line


CANDIDATES: dict[str, list[Candidate]] = {operation: [] for operation in OPERATIONS}
_calls: Counter[tuple[str, str]] = Counter()
_logged: set[str] = set()


def register(operation: str, candidate: Candidate) -> None:
    """Add a candidate; fused candidates are tried in the order in which they are added."""
    CANDIDATES[operation].append(candidate)


@lru_cache(maxsize=512)
def choose(operation: str, problem: Problem, policy: Policy) -> Choice:
    """Return what runs ``operation`` for ``problem`` under ``policy``.

    Raises:
        FallbackError: the policy is strict, prefers fused implementations and none can run.
    """
    import megatron_dsa.ops  # noqa: F401  (registers the candidates)

    fused = [c for c in CANDIDATES[operation] if c.fused]
    unfused = [c for c in CANDIDATES[operation] if not c.fused]
    rejected = []
    if not policy.fused:
        rejected += [(c.name, "not asked for (dsa_unfused)") for c in fused]
        fused = []
    elif not fused:
        rejected.append(("fused", "no fused implementation exists in this release"))
    for candidate in fused + unfused:
        reason = candidate.unsupported(problem)
        if reason is None:
            choice = Choice(operation, candidate, tuple(rejected))
            break
        rejected.append((candidate.name, reason))
    else:
        listing = "; ".join(f"{name}: {why}" for name, why in rejected)
        raise FallbackError(f"no implementation of {operation} can run here: {listing}")
    if policy.fused and policy.strict and choice.is_fallback:
        raise FallbackError(
            f"--dsa-strict refuses the fallback of {choice.describe()}. Fix one of the reasons, "
            "or drop --dsa-strict to run the torch implementation."
        )
    _log_once(choice, policy)
    return choice


def _log_once(choice: Choice, policy: Policy) -> None:
    line = choice.describe()
    if line in _logged:
        return
    _logged.add(line)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        # A fallback that nobody asked for is a warning: it must show at default log levels.
        level = logging.WARNING if policy.fused and choice.is_fallback else logging.INFO
        logger.log(level, "megatron_dsa %s", line)


def run(operation: str, problem: Problem, policy: Policy, *args, **kwargs):
    """Run ``operation`` with the implementation that :func:`choose` picks, and count the call."""
    candidate = choose(operation, problem, policy).candidate
    _calls[operation, candidate.name] += 1
    with torch.profiler.record_function(f"megatron_dsa.{operation}.{candidate.name}"):
        return candidate.load()(*args, **kwargs)


def report() -> dict[str, dict[str, int]]:
    """Return how often each implementation of each operation ran in this process."""
    counts: dict[str, dict[str, int]] = {}
    for (operation, name), count in sorted(_calls.items()):
        counts.setdefault(operation, {})[name] = count
    return counts


def reset_report() -> None:
    """Set the counts of :func:`report` back to zero."""
    _calls.clear()
