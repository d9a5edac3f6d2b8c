"""Checks that compare the operations at one shape with float64."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk.engine import LARGEST_DIM
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.spec import describe_index_call
from megatron_dsa.testing.cases import (
    Shape,
    difficult_lists,
    full_lists,
    layout_of,
    layout_of_tokens,
    sampled_tokens,
)
from megatron_dsa.testing.comparison import Comparison
from megatron_dsa.testing.indexer_loss import expected_loss, random_teacher
from megatron_dsa.testing.indexer_topk import (
    EngineCase,
    SelectionCase,
    exact_products,
    integer_index_inputs,
    random_index_inputs,
)
from megatron_dsa.testing.sparse_attention import (
    AttentionReference,
    attention_case,
    expected_attention,
)

FORWARD, BACKWARD, TEACHER = (
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
)
SCORES, TOPK, ENGINE_SCORES = "indexer_scores", "indexer_topk", "indexer_engine_scores"
LOSS = "sparse_indexer_loss"
#: Number of tokens compared in a full-size call.
_FULL_SIZE_TOKENS = 8

#: A call that returns a tuple, and the function that compares its result.
type Step = tuple[Callable[[], tuple], Callable[..., None]]
type Steps = Callable[[Policy, Comparison], list[Step]]


@dataclass(frozen=True)
class Check:
    """Comparison of all implementations of several operations.

    Attributes:
        calls: operation -> call; every combination of their implementations runs.
        steps: calls to compare; the first must repeat bit for bit.
        full_size: the timed call; by default the first step.
        unsupported: reason to skip this shape.
    """

    name: str
    label: str
    calls: dict[str, OpCall]
    steps: Steps
    full_size: Steps | None = None
    unsupported: str | None = None


def attention(shape: Shape, device: torch.device) -> Iterator[Check]:
    call = describe_call(
        device, dtype=shape.dtype, heads=shape.heads, qk_dim=shape.qk_dim, v_dim=shape.v_dim,
        topk=shape.topk, sink=shape.sink,
    )  # fmt: skip
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    layout = layout_of_tokens(layout_of(shape, device), sampled)
    case = attention_case(shape, difficult_lists(shape, layout))
    reference = AttentionReference(case)

    @functools.cache
    def full():
        case = attention_case(shape, full_lists(shape, device))
        tokens = sampled_tokens(len(case.q), _FULL_SIZE_TOKENS, device)
        return case, tokens, expected_attention(case.take(tokens))

    def run(operation: str, policy: Policy, *arguments) -> Any:
        return OPERATIONS[operation].run(call, policy, *arguments)

    def forward(policy: Policy, found: Comparison) -> list[Step]:
        compare = partial(reference.forward, found)
        return [
            (lambda: run(FORWARD, policy, case.inputs())[:2], compare),
            (lambda: run(FORWARD, policy, case.inputs(True)), compare),
        ]

    def full_forward(policy: Policy, found: Comparison) -> list[Step]:
        case, tokens, expected = full()

        def compare(out, lse):
            found.compare("out at full size", out[tokens], expected.out)
            found.compare("lse at full size", lse[tokens], expected.lse)

        return [(lambda: run(FORWARD, policy, case.inputs())[:2], compare)]

    def backward(policy: Policy, found: Comparison) -> list[Step]:
        outputs = run(FORWARD, policy, case.inputs())[:2]

        def call(want_p_sum: bool) -> tuple:
            return run(BACKWARD, policy, case.inputs(want_p_sum), *outputs, case.dout)

        def compare(*result) -> None:
            reference.backward(found, *result)
            dtype = result[1].dtype
            found.require(dtype == torch.float32, f"dkv is {dtype}, not float32")

        # Requesting p_sum may select another kernel.
        return [(lambda: call(False)[:3], compare), (lambda: call(True), compare)]

    def full_backward(policy: Policy, found: Comparison) -> list[Step]:
        case, tokens, expected = full()
        outputs = run(FORWARD, policy, case.inputs())[:2]

        def compare(dq, dkv, _dsink):
            found.compare("dq at full size", dq[tokens], expected.dq)
            found.require(torch.isfinite(dkv).all(), "dkv at full size not finite")

        return [(lambda: run(BACKWARD, policy, case.inputs(), *outputs, case.dout)[:3], compare)]

    def teacher(policy: Policy, found: Comparison) -> list[Step]:
        lse = reference.lse()
        compare = partial(reference.teacher, found)
        return [(lambda: (run(TEACHER, policy, case.inputs(), lse),), compare)]

    def full_teacher(policy: Policy, found: Comparison) -> list[Step]:
        case, tokens, expected = full()
        lse = run(FORWARD, Policy(), case.inputs())[1]

        def compare(p_sum):
            found.compare("p_sum at full size", p_sum[tokens], expected.p_sum)

        return [(lambda: (run(TEACHER, policy, case.inputs(), lse),), compare)]

    label = shape.attention_label()
    yield Check("forward", label, {FORWARD: call}, forward, full_forward)
    yield Check("backward", label, {FORWARD: call, BACKWARD: call}, backward, full_backward)
    yield Check("teacher", label, {TEACHER: call}, teacher, full_teacher)


def selection(shape: Shape, device: torch.device) -> Iterator[Check]:
    layout = layout_of(shape, device)
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    inputs = random_index_inputs(shape, shape.seq, device)
    silent = IndexerInputs(torch.zeros_like(inputs.q), inputs.k, inputs.weights)
    ordinary, equal, whole = (
        SelectionCase(x, layout, sampled, shape.topk)
        for x in (inputs, silent, integer_index_inputs(shape, shape.seq, device))
    )

    def steps(policy: Policy, found: Comparison) -> list[Step]:
        return [
            (_selecting(ordinary, policy), partial(ordinary.compare, found)),
            (
                _selecting(equal, policy),
                partial(equal.compare_exactly, "all scores equal", found),
            ),
            (
                _selecting(whole, policy),
                partial(whole.compare_exactly, "many equal scores", found),
            ),
        ]

    call = describe_index_call(inputs, layout, shape.topk)
    yield Check("index selection", shape.indexer_label(), {SCORES: call, TOPK: call}, steps)


def _selecting(case: SelectionCase, policy: Policy) -> Callable[[], tuple]:
    return partial(indexer_topk, case.inputs, case.layout, case.topk, policy=policy)


def engine_scores(shape: Shape, device: torch.device) -> Iterator[Check]:
    layout = layout_of(shape, device)
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    label = f"{shape.indexer_label()}, {DEEPGEMM_FP8}"
    inputs = random_index_inputs(shape, shape.seq, device)
    call = replace(describe_index_call(inputs, layout, shape.topk), dtype=FP8)
    if shape.index_dim > LARGEST_DIM:
        reason = f"engines have at most {LARGEST_DIM} index dims, got {shape.index_dim}"
        yield Check(
            "engine scores", label, {ENGINE_SCORES: call}, lambda *_: [], unsupported=reason
        )
        return
    ordinary, exact, equal = (
        EngineCase(x, layout, sampled, shape.topk)
        for x in (
            inputs,
            exact_products(shape, shape.seq, device),
            integer_index_inputs(shape, shape.seq, device),
        )
    )

    def steps(policy: Policy, found: Comparison) -> list[Step]:
        selecting = replace(
            policy, named=(*policy.named, (TOPK, "torch")), indexer_numerics=DEEPGEMM_FP8
        )

        def scores(case: EngineCase) -> tuple[torch.Tensor]:
            scored = OPERATIONS[ENGINE_SCORES].run(call, policy, *case.arguments())
            return (case.seen_scores(scored),)

        return [
            (partial(scores, ordinary), partial(ordinary.compare_scores, found)),
            (partial(scores, exact), partial(exact.compare_bits, found)),
            (_selecting(ordinary, selecting), partial(ordinary.compare, found)),
            (
                _selecting(equal, selecting),
                partial(equal.compare_exactly, "many equal scores", found),
            ),
        ]

    yield Check("engine scores", label, {ENGINE_SCORES: call}, steps)


def indexer_loss(shape: Shape, device: torch.device) -> Iterator[Check]:
    whole = layout_of(shape, device)
    layout = layout_of_tokens(whole, sampled_tokens(shape.seq, shape.rows, device))
    lists = difficult_lists(shape, layout)
    inputs = random_index_inputs(shape, layout.num_queries, device)
    inputs.k[lists.unselected] = float("nan")
    teacher = random_teacher(lists.indices)
    teacher[len(teacher) // 2] = 0
    expected = expected_loss(inputs, lists, teacher)

    def steps(policy: Policy, found: Comparison) -> list[Step]:
        def compare(loss, dq, dk, dweights):
            expected.compare(found, loss, dq, dk, dweights)
            found.require((dk[lists.unselected] == 0).all(), "dk of an unselected key is not 0")
            found.require((dq[lists.empty] == 0).all(), "dq of an empty row is not 0")

        return [(partial(_loss, inputs, lists, teacher, layout, policy), compare)]

    def full_size(policy: Policy, found: Comparison) -> list[Step]:
        last = torch.arange(shape.seq - shape.timed_tokens, shape.seq, device=device)
        lists = full_lists(shape, device)
        inputs = random_index_inputs(shape, shape.timed_tokens, device)

        def compare(*result):
            for name, x in zip(("loss", "dq", "dk", "dweights"), result, strict=True):
                found.require(torch.isfinite(x).all(), f"{name} at full size not finite")

        arguments = inputs, lists, random_teacher(lists.indices), layout_of_tokens(whole, last)
        return [(partial(_loss, *arguments, policy), compare)]

    call = describe_index_call(inputs, layout, shape.topk)
    yield Check("indexer loss", shape.indexer_label(), {LOSS: call}, steps, full_size)


def _loss(inputs, lists, teacher, layout, policy: Policy) -> tuple[torch.Tensor, ...]:
    q, k, weights = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.weights))
    loss = sparse_indexer_loss(
        IndexerInputs(q, k, weights, inputs.relu), lists.indices, teacher, layout,
        topk_length=lists.length, policy=policy,
    )  # fmt: skip
    return loss.detach(), *torch.autograd.grad(loss, [q, k, weights])


#: Pairs (check, labelling function): a check runs once per distinct label.
CHECKS: tuple[tuple[Callable, Callable[[Shape], str]], ...] = (
    (attention, Shape.attention_label),
    (selection, Shape.indexer_label),
    (engine_scores, Shape.indexer_label),
    (indexer_loss, Shape.indexer_label),
)
