"""The indexer on whole sequences: selection, and its losses with gradients.

    python -m benchmarks indexer
    python -m benchmarks indexer --tokens 8192 --operations select --ways tilelang cudnn

``select`` scores every visible pair and keeps the best keys, ``loss:LISTS`` is the KL sum with all
gradients over selected keys, ``dense`` the same in the warm-up stage, all through dispatch. A way
names implementations; dispatch chooses missing ones. ``deepgemm-fp8`` selects by scores in the
arithmetic of inference engines; ``recall`` is the share of exact scores' keys, ``rule_recall`` the
share of the float64 rule's keys, for a few queries. ``megatron`` is megatron-core's TileLang
indexer (:mod:`benchmarks.indexer.bundled`) and its unfused dense loss
(:mod:`benchmarks.indexer.dense`). The input is one causal sequence. FLOP count visible pairs: 2 *
heads * dim per pair for ``select``, three products per selected pair for ``loss``; ``dense`` the
same per visible pair, plus the teacher's scores. Peak memory includes the results.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks.attention.lists import make_indices
from benchmarks.indexer import bundled, dense
from benchmarks.settings import Settings, Work
from benchmarks.timing import Clock, measure, what_ran
from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.errors import ImplementationError
from megatron_dsa.metrics.flops import Keys
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.dispatch import Policy, reset_report
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.testing.cases import Lists, Shape, layout_of_tokens, sampled_tokens
from megatron_dsa.testing.comparison import LEAST_ENGINE_SHARE, comparison_at_model_shapes
from megatron_dsa.testing.indexer_loss import (
    ExpectedLoss,
    expected_dense_loss,
    expected_loss,
    random_teacher,
)
from megatron_dsa.testing.indexer_topk import (
    EngineCase,
    SelectionCase,
    random_index_inputs,
)

CEILINGS = ("gemm",)
ON_DEVICE = True
#: Dispatched operations of a measurement.
OPERATIONS = {
    "select": ("indexer_scores", "indexer_topk"),
    "loss": ("sparse_indexer_loss",),
    "dense": ("dense_indexer_loss",),
}
#: Selection in the arithmetic of inference engines, with our kernels.
ENGINE = DEEPGEMM_FP8


def _ways(operation: str, *more: str) -> tuple[str, ...]:
    return (*(each.name for each in DISPATCHED[operation].candidates), *more, bundled.WAY)


WAYS = {
    "select": _ways("indexer_topk", ENGINE),
    "loss": _ways("sparse_indexer_loss"),
    "dense": _ways("dense_indexer_loss"),
}
#: torch gathers keys for every token: longer sequences take minutes.
LONGEST_TORCH_LOSS = 8192
CHECKED_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """One causal sequence.

    Attributes:
        tokens: of the sequence.
        heads, dim: of the indexer; topk: keys selected per query.
        teacher_heads: heads of the dense loss's teacher.
        workspace_mib: budget of torch implementations.
    """

    tokens: int
    heads: int = 64
    dim: int = 128
    topk: int = 2048
    teacher_heads: int = 128
    workspace_mib: int = 256


@dataclass
class Call:
    """The timed call, the check of its result, and its necessary operations."""

    call: Callable
    check: Callable
    flop: int
    #: Filled by the check.
    figures: dict = field(default_factory=dict)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="8192 32768 131072, with --quick 96")
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    add("--lists", nargs="+", default=["sorted", "clustered"], help="of the loss")
    add("--heads", type=int, help="64, with --quick 4")
    add("--teacher-heads", type=int, help="of the dense loss: 128, with --quick 3")
    add("--topk", type=int, help="2048, with --quick 16")


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    quick = options.quick
    given = {
        "heads": options.heads or (4 if quick else 64),
        "topk": options.topk or (16 if quick else 2048),
        "teacher_heads": options.teacher_heads or (3 if quick else 128),
        "workspace_mib": options.workspace_mib,
    }
    works = [
        Work(f"loss:{lists}" if operation == "loss" else operation, way)
        for operation in options.operations
        for lists in (options.lists if operation == "loss" else (None,))
        for way in WAYS[operation]
    ]
    lengths = options.tokens or ([96] if quick else [8192, 32768, 131072])
    return [(Case(tokens, **given), works) for tokens in lengths]


def named(operation: str, way: str) -> tuple[tuple[str, str], ...]:
    """Return the implementations of a way; dispatch chooses missing ones."""
    there = {name: {c.name for c in DISPATCHED[name].candidates} for name in OPERATIONS[operation]}
    return tuple((name, way) for name, names in there.items() if way in names)


class _Measurer:
    def __init__(self, case: Case, device: torch.device, settings: Settings):
        self.case, self.settings, self.clock = case, settings, Clock(device)
        shape = Shape(1, 1, 1, case.heads, case.dim, case.topk, case.tokens, case.tokens)
        self.inputs = random_index_inputs(shape, case.tokens, device)
        self.layout = bshd_layout(case.tokens, 1, device)
        #: Query tokens compared with float64.
        self.checked = sampled_tokens(case.tokens, CHECKED_TOKENS + 1, device)[1:]

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        operation, _, lists = work.part.partition(":")
        self._check(operation, work.way, lists)
        is_engine = work.way == ENGINE
        policy = Policy(
            workspace_bytes=self.case.workspace_mib * 2**20,
            named=named(operation, "tilelang" if is_engine else work.way),
            indexer_numerics=ENGINE if is_engine else "exact",
        )
        make = {"select": self.select, "loss": self.loss, "dense": self.dense}[operation]
        made = make(policy, work.way == bundled.WAY, lists)
        reset_report()
        limits = self.settings.repeats, self.settings.budget
        result = measure(made.call, made.check, self.clock, *limits) | made.figures
        result["ran"] = what_ran()
        if result["status"] == "ok":
            result["tflops"] = made.flop / result["ms"] / 1e9
        yield work.part, result

    def _check(self, operation: str, way: str, lists: str) -> None:
        if operation != "loss":
            return
        if way == "torch" and self.case.tokens > LONGEST_TORCH_LOSS:
            raise ImplementationError("torch gathers keys token by token: minutes")
        if way == bundled.WAY and lists != "clustered":
            raise ImplementationError("it masks keys behind the query; these lists have such")

    def select(self, policy: Policy, is_bundled: bool, _lists: str) -> Call:
        case, inputs = self.case, self.inputs
        figures: dict[str, float] = {}

        def call():
            if is_bundled:
                return bundled.select(inputs, case.topk)
            return indexer_topk(inputs, self.layout, case.topk, policy=policy)

        def check(result):
            found = comparison_at_model_shapes(torch.bfloat16)
            selected = bundled.sorted_lists(result) if is_bundled else result
            right = SelectionCase(inputs, self.layout, self.checked, case.topk)
            if policy.indexer_numerics == ENGINE:
                figures.update(self._engine_figures(found, right, *selected))
            else:
                right.compare(found, *selected)
            return found

        flop = 2 * case.heads * case.dim * Keys().pairs(case.tokens)
        return Call(call, check, flop, figures)

    def _engine_figures(self, found, right: SelectionCase, indices, length) -> dict[str, float]:
        """Return recall of exact scores' keys and of the rule's; complain about the latter."""
        chosen = right.selected(found, indices, length)
        wanted = EngineCase(self.inputs, self.layout, self.checked, self.case.topk).best
        shares = {
            name: float((keys & chosen).sum() / keys.sum())
            for name, keys in (("recall", right.best), ("rule_recall", wanted))
        }
        share = shares["rule_recall"]
        least = LEAST_ENGINE_SHARE
        found.require(share >= least, f"{share:.4f} of the rule's keys < {least}")
        return shares

    def loss(self, policy: Policy, is_bundled: bool, lists: str) -> Call:
        """Return the sparse loss with the gradients of q, k and weights."""
        case, inputs = self.case, self._leaves()
        indices = make_indices(lists, case.tokens, case.tokens, case.topk, inputs.q.device)
        teacher = random_teacher(indices).masked_fill_(indices < 0, 0.0)
        scores = bundled.selected_scores(inputs, indices) if is_bundled else None

        def call():
            if is_bundled:
                return bundled.loss_gradients(inputs, indices, teacher, scores)
            value = sparse_indexer_loss(inputs, indices, teacher, self.layout, policy=policy)
            return torch.autograd.grad(value, [inputs.q, inputs.k, inputs.weights])

        def expected():
            some = Lists(indices[self.checked], None, case.tokens)
            return expected_loss(self._sampled(), some, teacher[self.checked])

        return Call(call, self._checks(expected), 6 * case.heads * case.dim * indices.numel())

    def dense(self, policy: Policy, is_bundled: bool, _lists: str) -> Call:
        """Return the dense loss with the gradients of q, k and weights."""
        inputs = dense.draw(self._leaves(), self.layout, self.case.teacher_heads)

        def call():
            return dense.bundled(inputs) if is_bundled else dense.ours(inputs, policy)

        def expected():
            layout = layout_of_tokens(self.layout, self.checked)
            some = replace(inputs, indexer=self._sampled(), layout=layout, q=inputs.q[self.checked])
            return expected_dense_loss(some)

        return Call(call, self._checks(expected), dense.flops(inputs))

    def _leaves(self) -> IndexerInputs:
        found = (self.inputs.q, self.inputs.k, self.inputs.weights)
        return IndexerInputs(*(x.detach().requires_grad_() for x in found))

    def _sampled(self) -> IndexerInputs:
        x, tokens = self.inputs, self.checked
        return IndexerInputs(x.q[tokens], x.k, x.weights[tokens])

    def _checks(self, expected: Callable[[], ExpectedLoss]) -> Callable:
        """Return a check of the sampled tokens' gradients; gradients of keys include other
        tokens.
        """

        def check(gradients):
            found, right = comparison_at_model_shapes(torch.bfloat16), expected()
            found.compare("dq", gradients[0][self.checked], right.q)
            found.compare("dweights", gradients[2][self.checked], right.weights)
            return found

        return check


prepare = _Measurer
