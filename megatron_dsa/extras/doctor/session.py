"""One run of the doctor on one device: running implementations, surviving their crashes."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_dsa.errors import DSAError
from megatron_dsa.extras.doctor.measure import (
    dirty_memory,
    median_ms,
    same_bits,
    seconds,
    synchronize,
)
from megatron_dsa.extras.doctor.results import NotChecked, Part, Report, Result
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Candidate, Policy
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.testing.cases import Shape
from megatron_dsa.testing.comparison import MODEL_SHAPES, by_figure

#: Equal calls whose results are compared bit for bit.
REPEATS = 3


def named(*pairs: tuple[str, Candidate]) -> Policy:
    """A policy under which exactly these implementations run."""
    return Policy(named=tuple((operation, candidate.name) for operation, candidate in pairs))


class Session:
    """Runs implementations on ``device`` and files what they did in ``report``.

    Attributes:
        tolerance, tolerances: largest relative error that passes, and those of some figures.
        timed: whether full-size calls are made and timed (on a GPU).
        lost: which implementation left the GPU unusable, if one did; nothing runs after that.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tolerance: float | None,
        report: Report,
    ):
        self.device = device
        self.tolerance = MODEL_SHAPES[dtype] if tolerance is None else tolerance
        self.tolerances = by_figure(self.tolerance) if tolerance is None else {}
        self.report = report
        self.timed = device.type == "cuda"
        self.lost: str | None = None

    def available(self, operation: str, call: OpCall, label: str) -> list[Any]:
        """Return pairs (operation, candidate) that can run ``call``; file the others."""
        found = []
        for candidate in OPERATIONS[operation].candidates:
            reason = candidate.reason(call)
            if reason is None:
                found.append((operation, candidate))
            else:
                self.skip(operation, candidate.name, label, reason)
        return found

    def skip(self, operation: str, name: str, label: str, reason: str) -> None:
        """File an implementation that was not run."""
        entry = NotChecked(operation, name, label, reason)
        if entry not in self.report.not_checked:
            self.report.not_checked.append(entry)

    def choice(self, operation: str, call: OpCall, label: str) -> str | None:
        """File what dispatch picks; returns the name, ``None`` if it refuses."""
        filed = self.report.chosen.setdefault(label, {})
        try:
            choice = OPERATIONS[operation].choose(call, Policy())
        except DSAError as error:
            filed[operation] = {"runs": None, "refused": str(error)}
            return None
        filed[operation] = {"runs": choice.candidate.name, "rejected": dict(choice.rejected)}
        return choice.candidate.name

    def part(self, *pairs: tuple[str, Candidate]) -> Part:
        """Return what notes the verdict on implementations, pairs (operation, candidate)."""
        return Part(
            tolerance=self.tolerance,
            tolerances=self.tolerances,
            implementations=tuple((operation, c.name) for operation, c in pairs),
            fused=any(c.fused for _, c in pairs),
            deterministic=all(c.support.deterministic for _, c in pairs),
        )

    def file(
        self, check: str, label: str, shape: Shape, parts: tuple[Part, ...], chosen: bool
    ) -> None:
        """File a verdict, or that there is none because the GPU was lost before."""
        skipped = next((part for part in parts if part.skipped), None)
        if skipped is not None:
            assert skipped.skipped is not None
            for operation, name in skipped.implementations:
                self.skip(operation, name, label, skipped.skipped)
            return
        self.report.results.append(Result(check, label, shape, parts, chosen))

    def attempt(self, part: Part, call: Callable) -> tuple[Any, float] | None:
        """Return ``call()`` and its seconds, or ``None`` after noting in ``part`` what happened."""
        if self.lost is not None:
            part.skipped = f"not run: the GPU was lost when {self.lost} crashed"
            return None
        try:
            return seconds(self.device, call)
        except Exception as error:  # whatever an implementation throws is its verdict
            lines = str(error).strip().splitlines() or [""]
            part.crashed = f"{type(error).__name__}: {lines[0][:200]}"
        if not self._alive():
            self.lost = part.name
        return None

    def _alive(self) -> bool:
        """Whether the device still works: an illegal access ends everything in this process."""
        try:
            synchronize(self.device)
            torch.zeros(1, device=self.device).sum().item()
        except RuntimeError:
            return False
        return True

    def once(
        self, part: Part, call: Callable[[], tuple], judge: Callable[..., None], warm=False
    ) -> Any:
        """Run and judge ``call``; returns its result, ``None`` if either crashed.

        ``warm``: the same call was made before, so its time is no time of compilation.
        """
        done = self.attempt(part, call)
        if done is None:
            return None
        result, elapsed = done
        if not warm:
            part.warmup_s += elapsed
        # A result that cannot even be compared (wrong shape, missing parts) is no crash of ours.
        return None if self.attempt(part, lambda: judge(*result)) is None else result

    def examine(self, part: Part, call: Callable[[], tuple], judge: Callable[..., None]) -> Any:
        """Run ``call`` several times into dirty memory; judge every result.

        Args:
            call: returns a tuple of tensors (or ``None``).
            judge: takes these, and notes errors and complaints in ``part``.

        Returns:
            the tuple of the first run, or ``None`` if a run crashed.
        """
        say(f"{part.name}: {', '.join(operation for operation, _ in part.implementations)}")
        first = self.once(part, call, judge)
        for _ in range(REPEATS - 1):
            if first is None:
                return None
            dirty_memory(first)
            again = self.once(part, call, judge, warm=True)
            if again is None:
                return None
            part.same_bits = part.same_bits is not False and same_bits(first, again)
        return first

    def full_size(self, part: Part, figure: str, call: Callable[[], tuple], judge=None) -> Any:
        """Run ``call`` once at full size, judge it and take its time; returns its result.

        Too little memory for the full size is a remark and no fault of the implementation.
        """
        if not self.timed or part.crashed or part.skipped:
            return None
        trial = replace(part)
        done = self.attempt(trial, call)
        if done is None:
            if trial.crashed and trial.crashed.startswith("OutOfMemoryError"):
                torch.cuda.empty_cache()
                part.remarks.append(f"{figure} not timed: out of memory at full size")
            elif trial.crashed:
                part.crashed = f"at full size: {trial.crashed}"
            return None
        result, elapsed = done
        part.warmup_s += elapsed
        if judge is not None and self.attempt(part, lambda: judge(*result)) is None:
            return None
        self.time(part, figure, call)
        return result

    def time(self, part: Part, figure: str, call: Callable) -> None:
        """Note the median time of ``call``, which was made before, unless ``part`` failed."""
        if not self.timed or part.crashed or part.skipped:
            return
        done = self.attempt(part, lambda: median_ms(call))
        if done is not None:
            part.ms[figure] = done[0]


def say(line: str) -> None:
    """Progress, while kernels are compiled; results go to stdout."""
    print(f"  ... {line}", file=sys.stderr, flush=True)
