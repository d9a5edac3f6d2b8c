"""One doctor run on one device, robust to crashing implementations."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

from megatron_dsa.errors import DSAError
from megatron_dsa.extras.doctor.checks import CHECKS, Check, Step
from megatron_dsa.extras.doctor.report import NotChecked, Report, Verdict
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.testing.cases import Shape
from megatron_dsa.testing.comparison import MODEL_SHAPES, by_figure

REPEATS = 3


class Session:
    """Runner of implementations on ``device``; appends the results to ``report``.

    Attributes:
        timed: run and time full-size calls (GPU only).
        lost: the implementation that left the GPU unusable; nothing runs after it.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tolerance: float | None, report: Report
    ):
        self.device, self.report = device, report
        self.tolerance = MODEL_SHAPES[dtype] if tolerance is None else tolerance
        self.tolerances = by_figure(self.tolerance) if tolerance is None else {}
        self.timed = device.type == "cuda"
        self.lost: str | None = None

    def run(self, shapes: list[Shape]) -> None:
        checked: set[str] = set()
        for checks, label_of in CHECKS:
            for shape in {label_of(shape): shape for shape in shapes}.values():
                label = label_of(shape)
                if self.lost is not None:
                    self.skip(checks.__name__, "(all)", label, self._lost())
                    continue
                try:
                    for check in checks(shape, self.device):
                        checked |= check.calls.keys()
                        self._check(check, shape)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    self.report.incomplete.append(
                        f"{checks.__name__} of {label}: out of memory in the float64 reference; "
                        "try --rows 64"
                    )
                except RuntimeError:
                    if self.lost is None:
                        raise
                    self.skip(checks.__name__, "(all)", label, self._lost())
        others = ", ".join(sorted(OPERATIONS.keys() - checked))
        self.report.remarks.append(f"checked by the unit tests and not here: {others}")

    def _check(self, check: Check, shape: Shape) -> None:
        if check.unsupported is not None:
            for operation in check.calls:
                self.skip(operation, "(all)", check.label, check.unsupported)
            return
        picked = [self._choice(op, call, check.label) for op, call in check.calls.items()]
        usable = [self._available(op, call, check.label) for op, call in check.calls.items()]
        for candidates in itertools.product(*usable):
            names = dict(zip(check.calls, (c.name for c in candidates), strict=True))
            if self.lost is not None:
                for operation, name in names.items():
                    self.skip(operation, name, check.label, self._lost())
                continue
            verdict = Verdict(
                self.tolerance,
                self.tolerances,
                check=check.name,
                label=check.label,
                shape=shape,
                implementations=names,
                fused=any(c.fused for c in candidates),
                deterministic=all(c.support.deterministic for c in candidates),
                chosen=list(names.values()) == picked,
            )
            print(f"  ... {verdict.name}: {', '.join(names)}", file=sys.stderr, flush=True)
            self._judge(verdict, check, Policy(named=tuple(names.items())))
            self.report.results.append(verdict)

    def _lost(self) -> str:
        return f"not run: the GPU was lost when {self.lost} crashed"

    def _available(self, operation: str, call: OpCall, label: str) -> list:
        found = []
        for candidate in OPERATIONS[operation].candidates:
            reason = candidate.reason(call)
            if reason is None:
                found.append(candidate)
            else:
                self.skip(operation, candidate.name, label, reason)
        return found

    def skip(self, operation: str, name: str, label: str, reason: str) -> None:
        entry = NotChecked(operation, name, label, reason)
        if entry not in self.report.not_checked:
            self.report.not_checked.append(entry)

    def _choice(self, operation: str, call: OpCall, label: str) -> str | None:
        filed = self.report.chosen.setdefault(label, {})
        try:
            choice = OPERATIONS[operation].choose(call, Policy())
        except DSAError as error:
            filed[operation] = {"runs": None, "refused": str(error)}
            return None
        filed[operation] = {"runs": choice.candidate.name, "rejected": dict(choice.rejected)}
        return choice.candidate.name

    def _judge(self, verdict: Verdict, check: Check, policy: Policy) -> None:
        where = ""
        try:
            first, *others = check.steps(policy, verdict)
            call, compare = first
            result = self._run(verdict, first)
            for _ in range(REPEATS - 1):
                _dirty_memory(result)
                again = call()
                compare(*again)
                verdict.same_bits = verdict.same_bits is not False and same_bits(result, again)
            for step in others:
                self._run(verdict, step)
            del result, again
            where = "at full size: "
            if self.timed:
                self._time(verdict, check, policy, call)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            verdict.crashed = f"{where}{type(error).__name__}: {lines[0][:200]}"
            if not self._alive():
                self.lost = verdict.name

    def _run(self, verdict: Verdict, step: Step) -> tuple:
        call, compare = step
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        verdict.first_calls_s += time.perf_counter() - begin
        compare(*result)
        return result

    def _time(self, verdict: Verdict, check: Check, policy: Policy, call: Callable) -> None:
        try:
            if check.full_size is not None:
                (step,) = check.full_size(policy, verdict)
                self._run(verdict, step)
                call = step[0]
            verdict.ms = median_ms(call)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            verdict.remarks.append("not timed: out of memory at full size")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _alive(self) -> bool:
        try:
            self._synchronize()
            torch.zeros(1, device=self.device).sum().item()
        except RuntimeError:
            return False
        return True


def same_bits(first: tuple, second: tuple) -> bool:
    def bits(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.detach().contiguous().reshape(-1).view(torch.uint8)

    for a, b in zip(map(bits, first), map(bits, second), strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not torch.equal(a, b):
            return False
    return True


def _dirty_memory(results: tuple) -> None:
    """Fill freed memory with NaN or huge integers, to expose results that are not fully written."""
    blocks = [
        torch.full_like(x, float("nan") if x.is_floating_point() else 2**30, requires_grad=False)
        for x in results
        if x is not None
    ]
    del blocks


def median_ms(function: Callable, enough_ms: float = 400.0, repeats: int = 9) -> float:
    """Return the median GPU time of a warm call in ms."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < enough_ms:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
