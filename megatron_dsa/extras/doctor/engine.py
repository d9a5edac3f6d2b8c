"""Index scores in the arithmetic of inference engines (``--dsa-indexer-numerics deepgemm-fp8``)."""

from dataclasses import replace
from functools import partial

import torch

from megatron_dsa.dsa_kernels import indexer_topk
from megatron_dsa.extras.doctor.results import Part
from megatron_dsa.extras.doctor.session import Session, named
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk.engine import LARGEST_DIM
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.inputs import describe_index_call
from megatron_dsa.testing.cases import Shape, layout_of, sampled_tokens
from megatron_dsa.testing.indexer_topk import (
    EngineCase,
    exact_products,
    integer_index_inputs,
    random_index_inputs,
)
from megatron_dsa.ops.indexer_topk.spec import describe_index_call
from megatron_dsa.testing.engine_scores import EngineCase, exact_products
from megatron_dsa.testing.indexer_topk import integer_index_inputs, random_index_inputs
from megatron_dsa.testing.layouts import sampled_tokens
from megatron_dsa.testing.lists import layout_of
from megatron_dsa.testing.shapes import Shape

SCORES, TOPK = "indexer_engine_scores", "indexer_topk"


def check_engine_scores(session: Session, shape: Shape) -> None:
    """File a verdict on every implementation of the scores."""
    device, label = session.device, f"{shape.indexer_label()}, {DEEPGEMM_FP8}"
    if shape.index_dim > LARGEST_DIM:
        reason = f"engines have at most {LARGEST_DIM} index dims, got {shape.index_dim}"
        session.skip(SCORES, "(all)", label, reason)
        return
    layout = layout_of(shape, device)
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    cases = [
        EngineCase(x, layout, sampled, shape.topk)
        for x in (
            random_index_inputs(shape, shape.seq, device),
            exact_products(shape, shape.seq, device),
            integer_index_inputs(shape, shape.seq, device),
        )
    ]
    op_call = replace(describe_index_call(cases[0].inputs, layout, shape.topk), dtype=FP8)
    picked = session.choice(SCORES, op_call, label)
    for pair in session.available(SCORES, op_call, label):
        part = _judge(session, op_call, pair, *cases)
        session.file("engine scores", label, shape, (part,), pair[1].name == picked)


def _judge(session: Session, op_call: OpCall, pair, ordinary, exact, equal) -> Part:
    """Return the verdict on one implementation: its scores, then selections by them."""
    part = session.part(pair)

    def scores(case: EngineCase) -> tuple[torch.Tensor]:
        found = OPERATIONS[SCORES].run(op_call, named(pair), *case.arguments())
        return (case.seen_scores(found),)

    def select(case: EngineCase) -> tuple[torch.Tensor, torch.Tensor]:
        # Its top-k has verdicts of its own.
        policy = replace(
            named(pair), named=((SCORES, pair[1].name), (TOPK, "torch")),
            indexer_numerics=DEEPGEMM_FP8,
        )  # fmt: skip
        return indexer_topk(case.inputs, case.layout, case.topk, policy=policy)

    def compare_ties(*selected) -> None:
        equal.compare_exactly("many equal scores", part, *selected)

    done = session.examine(
        part, partial(scores, ordinary), lambda found: ordinary.compare_scores(part, found)
    )
    if done is not None:
        for call, judge in (
            (partial(scores, exact), partial(exact.compare_bits, part)),
            (partial(select, ordinary), partial(ordinary.compare, part)),
            (partial(select, equal), compare_ties),
        ):
            session.once(part, call, judge, warm=True)
        session.time(part, "selection", partial(select, ordinary))
    return part
