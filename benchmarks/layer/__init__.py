"""Whole attention layers, forward and backward on one GPU: time, memory, shares of operations.

    python -m benchmarks layer                     # V3.2's, and V4's of every ratio
    python -m benchmarks layer --presets v3.2 --heads 128 --tokens 4096 131072 --ways ours dense
    python -m benchmarks layer --presets v3.2 --ways ours sparse recomputed masked dense
    python -m benchmarks layer --presets v3.2 --heads 16 --ways masked-rank dense-rank
    python -m benchmarks layer --presets v3.2 --heads 16 --tokens 4096 --ways ours graph
    python -m benchmarks layer --presets glm-5.3-flash glm-5.3-flash-kda
    python -m benchmarks layer --presets core      # the workspace's bound, on the CPU

A step is the forward in training mode of one causal sequence and the backward of a random gradient,
in sparse ways with indexer and sparse loss. Ways (:mod:`benchmarks.layer.peers`) have the same
weights and inputs and compile in a short step first. The first step measures torch's peak memory
above weights, input and their gradients; then forwards and steps are timed, including the host if
the GPU waits for it. ``out_error`` compares the output of the first tokens, which select all
visible keys, with the first way, ``ours``. ``end_error`` compares output and input gradient of the
last tokens in sparse ways: near-ties select other keys, overflowing addresses give much larger
errors. Ways that may fault come last.

``sparse-rank``, ``masked-rank`` and ``dense-rank`` are one tensor-parallel rank with the case's
heads (:mod:`benchmarks.layer.rank`): its heads of a model of 128, and its share of tokens for work
divided by tokens, including indexer and loss. Nothing is sent: ``sent_bytes`` counts the
collectives' bytes, ``step/collectives`` is the time of the copies that replace them. Other ways
with the same heads have all tokens, as if every rank repeated the indexer's work.

``graph`` is ``ours`` with its step captured in one CUDA graph (:mod:`benchmarks.layer.graph`).
``graph_error`` compares output and gradients of a replay with an uncaptured step, ``peak_mib`` is
the capture's, ``kernel_ms`` the time of all kernels, copies and fills of one replay; for ``ours``
the parts ``step/OPERATION`` sum up to it.

Kernels of one more step of the package's ways are attributed to operations
(:mod:`benchmarks.tracing`): ``step/matrix products`` are projections, ``step/other`` rope, norms
and copies. Preset ``core``: :mod:`benchmarks.layer.core`.
"""

import argparse
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.child import still_works
from benchmarks.layer import rank
from benchmarks.layer.graph import GRAPH, StepGraph, checked_error
from benchmarks.layer.peers import build
from benchmarks.megatron_layer import Layer, LayerSpec, shortened
from benchmarks.process_groups import alone
from benchmarks.ranks.traffic import counted
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, Peak, summary, what_ran
from benchmarks.tracing import all_kernels_milliseconds, profiled
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dispatch import reset_report
from megatron_dsa.testing.comparison import relative_error

CEILINGS = ()
ON_DEVICE = True
#: Ways of a DSA layer, and of a CSA layer.
DSA_WAYS = (
    "ours", "all-queries", "frozen", "sparse", "recomputed", "masked", "dense", "ours-dense",
    *rank.WAYS, GRAPH, "bundled",
)  # fmt: skip
DENSE_WAYS = ("dense", "ours-dense")
#: Ways that select other keys than ``ours``.
UNLIKE = (*DENSE_WAYS, "unpooled")
CSA_WAYS = ("ours", "recomputed", "all-queries", "frozen", "torch", GRAPH)
#: Heads of a DSA layer of all tensor-parallel ranks together.
ALL_HEADS = {"v3.2": 128, "glm-5.3-flash": 64, "glm-5.3-flash-kda": 64, "tiny": 32}
RATIOS = (0, 4, 128)
CORE = "core"
POOLED, KDA = "glm-5.3-flash", "glm-5.3-flash-kda"
#: Ways by preset; others have those of CSA layers.
WAYS = {
    "v3.2": DSA_WAYS, "tiny": DSA_WAYS, CORE: ("torch",), KDA: ("ours", "torch"),
    POOLED: ("ours", "unpooled", "frozen", "sparse", "masked", "dense", "ours-dense"),
}  # fmt: skip
PRESETS = ("v3.2", POOLED, KDA, "v4-flash", "v4-pro", CORE, "tiny", "tiny-csa")
LENGTHS = {
    "v3.2": [4096 * 2**i for i in range(6)], POOLED: [4096, 8192, 16384, 32768, 65536],
    KDA: [4096, 8192, 16384, 32768, 65536], CORE: [1024, 2048, 4096, 8192], "tiny": [64, 128],
    "tiny-csa": [256],
}  # fmt: skip
CSA_LENGTHS = [4096, 16384, 65536]
#: Longer sequences take seconds per step without fused kernels.
LONGEST_TORCH = 16384
#: Tokens of steps that only compile.
PREPARE_TOKENS = 4096
#: With fewer timed calls, the median could be an outlier.
FEWEST = 3
#: Output tokens compared between ways.
COMPARED_TOKENS = 64
#: Each way rounds several bf16 products.
OUT_ERROR_LIMIT = 5e-2
#: Near-ties of the selection give 0.1 to 0.2.
END_ERROR_LIMIT = 0.5


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        preset: one of :data:`PRESETS`.
        tokens: of one causal sequence.
        heads: of a DSA layer.
        ratio: compression ratio of a CSA layer.
        workspace_mib: budget of torch implementations.
    """

    preset: str
    tokens: int
    heads: int | None = None
    ratio: int | None = None
    workspace_mib: int = 256

    @property
    def ranks(self) -> int:
        """Return the number of ranks with these heads; 1 if the model's heads do not divide so."""
        ranks, rest = divmod(ALL_HEADS[self.preset], self.heads or ALL_HEADS[self.preset])
        return 1 if rest else ranks

    def of_all_ranks(self) -> LayerSpec:
        """Return the layer of all ranks, one of which has these heads."""
        return dataclasses.replace(self.spec(), heads=ALL_HEADS[self.preset])

    def spec(self) -> LayerSpec:
        return LayerSpec(
            self.preset.removesuffix("-csa"), self.tokens, self.ratio, self.heads,
            sequence_length=self.tokens, workspace_mib=self.workspace_mib,
        )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--presets", nargs="+", choices=PRESETS,
        help="v3.2 v4-flash v4-pro, with --quick tiny tiny-csa")  # fmt: skip
    add("--tokens", type=int, nargs="+", help="default: depends on the preset")
    add("--heads", type=int, nargs="+", default=[128, 64, 16],
        help="of v3.2 (128 64 16); 16 are those of one of 8 tensor-parallel ranks")  # fmt: skip
    add("--ratios", type=int, nargs="+", choices=RATIOS, default=list(RATIOS),
        help="of CSA layers (0 4 128)")  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    default = ("tiny", "tiny-csa") if options.quick else ("v3.2", "v4-flash", "v4-pro")
    found = []
    for preset in options.presets or default:
        lengths = options.tokens or LENGTHS.get(preset, CSA_LENGTHS)
        heads = options.heads if preset == "v3.2" else [4] if preset == "tiny" else [None]
        ratios = [None] if preset in WAYS else options.ratios
        for tokens, count, ratio in itertools.product(sorted(lengths), heads, ratios):
            case = Case(preset, tokens, count, ratio, options.workspace_mib)
            ways = [
                way for way in WAYS.get(preset, CSA_WAYS) if way not in rank.WAYS or case.ranks > 1
            ]
            found.append((case, [Work("step", way) for way in ways]))
    return found


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.device, self.settings = case, device, settings
        self.clock = Clock(device)
        self._first: dict[str, torch.Tensor] | None = None

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        case = self.case
        if case.preset == CORE:
            yield from measure_core(case)
        elif work.way in rank.WAYS:
            with rank.one_rank_of(case.ranks) as build_rank:
                yield from self._measure_layer(work, case.of_all_ranks(), build_rank)
        else:
            alone()
            yield from self._measure_layer(work, case.spec(), build)

    def _measure_layer(
        self, work: Work, spec: LayerSpec, build: rank.Build
    ) -> Iterator[tuple[str, dict]]:
        way, case = work.way, self.case
        if way == "torch" and case.tokens > LONGEST_TORCH:
            raise ImplementationError(f"more than {LONGEST_TORCH} tokens in torch: minutes")
        if way == GRAPH and not self.clock.on_gpu:
            raise ImplementationError("CUDA graphs need a GPU")
        build(way, shortened(spec, PREPARE_TOKENS), self.device)[0].step()
        still_works(self.clock)  # frees memory
        layer, remark = build(way, spec, self.device)
        for tensor in (*layer.module.parameters(), layer.x):
            tensor.grad = torch.zeros_like(tensor)
        gc.collect()
        result, once = self._first_step(way, layer, remark)
        if result["status"] != "ok":
            yield work.part, result
            return
        if way == GRAPH:
            yield work.part, self._measure_graph(layer, result["ran"])
            return
        yield "forward", {"status": "ok", **self._times(layer.forward, once)}
        times = self._times(layer.step, once)
        yield work.part, result | times | {"tokens_per_s": case.tokens / times["ms"] * 1e3}
        if way in (*CSA_WAYS, *rank.WAYS, "unpooled"):
            yield from profiled(layer.step, self.device)

    def _measure_graph(self, layer: Layer, ran: str) -> dict:
        """Return the result of a layer's step as one CUDA graph, after an uncaptured run."""
        graph = StepGraph(layer, self.clock)
        error = checked_error(layer, graph, OUT_ERROR_LIMIT)
        times = self._times(graph.replay, self.clock.seconds(graph.replay))
        return {
            "status": "ok", "ran": ran, **times, "peak_mib": graph.peak_mib, "graph_error": error,
            "tokens_per_s": self.case.tokens / times["ms"] * 1e3,
            "kernel_ms": all_kernels_milliseconds(graph.replay),
        }  # fmt: skip

    def _times(self, call, once: float) -> dict:
        most = self.settings.repeats
        count = max(min(FEWEST, most), min(most, int(self.settings.budget / once)))
        return summary(self.clock.milliseconds(call, count))

    def _first_step(self, way: str, layer, remark: str) -> tuple[dict, float]:
        """Return the result of an untimed step, and its seconds."""
        from megatron_dsa.extras.doctor.bundled import declined_hooks

        reset_report()
        begin = time.perf_counter()
        with counted() as traffic, declined_hooks() as declined, Peak(self.clock) as peak:
            out = layer.forward()
            first = out.detach()[: layer.config.dsa_indexer_topk]
            own = {"out": first[:: math.ceil(len(first) / COMPARED_TOKENS)].clone()}
            own["end"] = out.detach()[-COMPARED_TOKENS:].clone()
            out.backward(layer.gradient)
            del out, first
        own["end_gradient"] = layer.x.grad[-COMPARED_TOKENS:].clone()
        once = time.perf_counter() - begin
        parts = (remark, declined and f"declined={'+'.join(declined)}", what_ran())
        result = {"peak_mib": peak.mib, "ran": "; ".join(filter(None, parts))}
        if traffic.calls:
            result["sent_bytes"] = traffic.bytes
        return result | self.agreement(way, own), once

    def agreement(self, way: str, own: dict[str, torch.Tensor]) -> dict:
        """Return status and errors of a way's tensors, compared with the first way's."""
        if not all(bool(tensor.isfinite().all()) for tensor in own.values()):
            return {"status": "failed", "reason": "output or gradient is not finite"}
        if way in rank.WAYS:  # some tokens only, and other ranks' data are made up
            return {"status": "ok"}
        if self._first is None and way == "ours":
            self._first = own
            return {"status": "ok"}
        if self._first is None:  # nothing to compare with
            return {"status": "ok"}
        pairs = {name: (tensor, self._first[name]) for name, tensor in own.items()}
        row = {"status": "ok", "out_error": relative_error(*pairs.pop("out"))}
        limits = {"out_error": OUT_ERROR_LIMIT}
        if way not in UNLIKE:
            row["end_error"] = max(relative_error(*pair) for pair in pairs.values())
            limits["end_error"] = END_ERROR_LIMIT
        for name, limit in limits.items():
            if not row[name] <= limit:
                reason = f"not the results of ours: {name} {row[name]:.3g} is above {limit}"
                row |= {"status": "failed", "reason": reason}
        return row


def measure_core(case: Case) -> Iterator[tuple[str, dict]]:
    from benchmarks.layer import core

    yield from core.measure_core(case.tokens, case.workspace_mib)


def prepare(case: Case, device: torch.device, settings: Settings) -> _Measurer:
    """Start Megatron if the case needs it."""
    if case.preset == CORE:
        return _Measurer(case, torch.device("cpu"), settings)
    if (there := alone()).type != device.type:
        raise ImplementationError(f"layers run on {there}, where Megatron puts them")
    return _Measurer(case, device, settings)
