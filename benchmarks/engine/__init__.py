"""Layers of V3.2's width with transformer-engine, in bf16 and FP8, and with Megatron's linears.

    python -m benchmarks engine --total 500
    python -m benchmarks engine --tokens 8192 --mlps dense --ways te-bf16 te-blockwise

A stack is two layers: sparse attention of 128 heads with indexer and its loss, and a dense MLP or 8
experts (6 per token, and a shared one). A step is forward and backward in stage ``sparse``, the
only microbatch of a training step, in which transformer-engine quantises the weights. Gradients are
in bf16 and not accumulated. Ways: ``local``, Megatron's linears (experts in a loop); ``te-bf16``,
transformer-engine's (grouped experts); ``te-tensorwise`` and ``te-blockwise``, with an FP8 recipe.
All have the same weights and inputs.

``first step`` has the peak memory above the weights, including gradients and quantised weights, and
compares the output of the first tokens, which select all visible keys, with ``local``. ``step``
times all ways in turn, round by round, in one process. ``time_over_te`` is the median over rounds
of a way's time relative to ``te-bf16`` in the same round. Stacks that do not fit together are built
and freed per turn. ``step/GROUP`` is the kernel time of one more step
(:mod:`benchmarks.engine.kernels`).
"""

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.engine.kernels import kernel_groups
from benchmarks.engine.stacks import BF16, DENSE, EXPERTS, LOCAL, WAYS, WIDTHS, Stack, build
from benchmarks.layer import COMPARED_TOKENS, FEWEST, OUT_ERROR_LIMIT, PREPARE_TOKENS
from benchmarks.process_groups import alone
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, Peak, quantile, summary, what_ran
from benchmarks.tracing import trace_of
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dispatch import reset_report
from megatron_dsa.testing.comparison import relative_error

CEILINGS = ()
ON_DEVICE = True
FIRST, STEP = "first step", "step"
#: Factors of an FP8 product have 3 or 2 mantissa bits.
FP8_ERROR_LIMIT = 0.3


@dataclass(frozen=True)
class Case:
    """A stack of layers.

    Attributes:
        preset: key of :data:`~benchmarks.engine.stacks.WIDTHS`.
        tokens: of one causal sequence.
        mlp: ``dense`` or ``experts``.
        workspace_mib: budget of torch implementations.
    """

    preset: str
    tokens: int
    mlp: str
    workspace_mib: int = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="(8192 32768, with --quick 64)")
    add("--mlps", nargs="+", choices=(DENSE, EXPERTS), default=[DENSE, EXPERTS],
        help="(dense experts)")  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    """Return the stacks, short sequences first."""
    preset = "tiny" if options.quick else "v3.2"
    lengths = options.tokens or ([64] if options.quick else [8192, 32768])
    works = [Work(part, way) for part in (FIRST, STEP) for way in WAYS]
    return [
        (Case(preset, tokens, mlp, options.workspace_mib), works)
        for tokens in sorted(lengths)
        for mlp in options.mlps
    ]


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings, build=build):
        self.case, self.device, self.settings = case, device, settings
        self.clock = Clock(device)
        self.one_at_a_time = False
        self._build = build
        self._stacks: dict[str, Stack] = {}
        self._reference: torch.Tensor | None = None
        #: Way -> implementations of its first step; these ways are timed.
        self._ran: dict[str, str] = {}
        self._found: dict[str, dict] | None = None

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        if work.part == FIRST:
            try:
                result = self._retried(lambda: self._first_step(work.way))
            except Exception:
                self._stacks.pop(work.way, None)
                raise
            if result["status"] == "ok":
                self._ran[work.way] = result["ran"]
            yield work.part, result
            return
        if work.way not in self._ran:
            raise ImplementationError("its first step failed, or its process has ended since")
        if self._found is None:
            self._found = self._retried(self._rounds)
        yield work.part, self._found[work.way]
        if self.clock.on_gpu:
            stack, _ = self._stack(work.way)
            stack.step()
            yield from kernel_groups(trace_of(stack.step, on_gpu=True))
            stack.clear()

    def _retried(self, call: Callable):
        """Call; if memory is short, retry with one stack at a time."""
        try:
            return call()
        except RuntimeError as error:  # libraries raise their own out-of-memory errors
            if self.one_at_a_time or "out of memory" not in str(error).lower():
                raise
        # Outside of the handler, whose traceback holds memory.
        self.one_at_a_time = True
        self._free()
        return call()

    def _free(self) -> None:
        self._stacks.clear()
        gc.collect()
        if self.clock.on_gpu:
            torch.cuda.empty_cache()

    def _stack(self, way: str) -> tuple[Stack, bool]:
        """Return a way's stack, and whether it was built now."""
        if way in self._stacks:
            return self._stacks[way], False
        if self.one_at_a_time:
            self._free()
        case = self.case
        stack = self._build(
            way, case.preset, case.tokens, case.mlp, case.workspace_mib, self.device
        )
        self._stacks[way] = stack
        return stack, True

    def _first_step(self, way: str) -> dict:
        stack, _ = self._stack(way)
        with Peak(self.clock) as peak:
            stack.step(min(self.case.tokens, PREPARE_TOKENS))  # compiles
            stack.clear()
            peak.restart()
            reset_report()
            out = stack.step()
        ran = "; ".join(filter(None, (stack.remark, what_ran())))
        gradients = [stack.x.grad, *(p.grad for p in stack.block.parameters())]
        finite = all(bool(g.isfinite().all()) for g in (out, *gradients) if g is not None)
        stack.clear()
        result = {"status": "ok", "peak_mib": peak.mib, "ran": ran}
        if not finite:
            return result | {"status": "failed", "reason": "output or gradient is not finite"}
        first = out[: stack.block.config.dsa_indexer_topk]
        return result | self.agreement(way, first[:: math.ceil(len(first) / COMPARED_TOKENS)])

    def agreement(self, way: str, out: torch.Tensor) -> dict:
        """Return status and error of a way's output of some tokens, compared with ``local``."""
        if way == LOCAL:
            self._reference = out.clone()
        if way == LOCAL or self._reference is None:
            return {"status": "ok"}
        error = relative_error(out, self._reference)
        limit = FP8_ERROR_LIMIT if WAYS[way].get("fp8") else OUT_ERROR_LIMIT
        if error <= limit:
            return {"status": "ok", "out_error": error}
        reason = f"not the output of local: out_error {error:.3g} is above {limit}"
        return {"status": "failed", "out_error": error, "reason": reason}

    def _rounds(self) -> dict[str, dict]:
        times: dict[str, list[float]] = {way: [] for way in self._ran}
        settings = self.settings
        begin, most = time.perf_counter(), settings.budget * len(times)
        for count in range(settings.repeats):
            if count >= FEWEST and time.perf_counter() - begin > most:
                break
            for way in times:
                stack, new = self._stack(way)
                if new:
                    stack.step()
                times[way] += self.clock.milliseconds(stack.step, 1)
                stack.clear()
        return {way: self._result(way, times) for way in times}

    def _result(self, way: str, times: dict[str, list[float]]) -> dict:
        result = {"status": "ok", **summary(times[way]), "ran": self._ran[way]}
        result["tokens_per_s"] = self.case.tokens / result["ms"] * 1e3
        if BF16 in times and way != BF16:
            ratios = [a / b for a, b in zip(times[way], times[BF16], strict=True)]
            result["time_over_te"] = quantile(ratios, 0.5)
        return result


def prepare(case: Case, device: torch.device, settings: Settings) -> _Measurer:
    if case.preset not in WIDTHS:
        raise ImplementationError(f"no widths of preset {case.preset!r}")
    if (there := alone()).type != device.type:
        raise ImplementationError(f"layers run on {there}, where Megatron puts them")
    return _Measurer(case, device, settings)
