"""The indexer: selection by every pair of scores and top-k, and its sparse loss with gradients.

Scores in the arithmetic of inference engines are in :mod:`.engine`.
"""

import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.extras.doctor.results import Part
from megatron_dsa.extras.doctor.session import Session, named
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk.api import candidates_for
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.inputs import describe_index_call
from megatron_dsa.testing.cases import (
    Shape,
    difficult_lists,
    full_lists,
    layout_of,
    layout_of_tokens,
    sampled_tokens,
)
from megatron_dsa.ops.indexer_topk.spec import describe_index_call
from megatron_dsa.testing.indexer_loss import expected_loss, random_teacher
from megatron_dsa.testing.indexer_topk import (
    SelectionCase,
    integer_index_inputs,
    random_index_inputs,
)

SCORES, TOPK, LOSS = "indexer_scores", "indexer_topk", "sparse_indexer_loss"


def check_selection(session: Session, shape: Shape) -> None:
    """File a verdict on every pair of scores and top-k."""
    device, label = session.device, shape.indexer_label()
    layout = layout_of(shape, device)
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    inputs = random_index_inputs(shape, shape.seq, device)
    call = describe_index_call(inputs, layout, shape.topk)
    picked = [session.choice(op, call, label) for op in (SCORES, TOPK)]
    usable = [session.available(op, call, label) for op in (SCORES, TOPK)]
    silent = IndexerInputs(torch.zeros_like(inputs.q), inputs.k, inputs.weights)
    cases = [
        SelectionCase(x, layout, sampled, shape.topk)
        for x in (inputs, silent, integer_index_inputs(shape, shape.seq, device))
    ]
    for pairs in [(scores, topk) for scores in usable[0] for topk in usable[1]]:
        part = _select(session, pairs, *cases)
        chosen = [candidate.name for _, candidate in pairs] == picked
        session.file("index selection", label, shape, (part,), chosen)


def _select(session: Session, pairs, ordinary, equal, whole) -> Part:
    """Return the verdict on one pair, from three cases."""
    part = session.part(*pairs)

    def select(case: SelectionCase):
        policy = named(*pairs)
        return lambda: indexer_topk(case.inputs, case.layout, case.topk, policy=policy)

    def compare_exactly(what: str, case: SelectionCase):
        return lambda *result: case.compare_exactly(what, part, *result)

    done = session.examine(part, select(ordinary), lambda *result: ordinary.compare(part, *result))
    if done is not None:
        what = "all scores equal"
        session.once(part, select(equal), compare_exactly(what, equal), warm=True)
        what = "many equal scores"
        session.once(part, select(whole), compare_exactly(what, whole), warm=True)
        session.time(part, "selection", select(ordinary))
    return part


def check_loss(session: Session, shape: Shape) -> None:
    """File a verdict on every sparse loss with its gradients."""
    device, label = session.device, shape.indexer_label()
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    layout = layout_of_tokens(layout_of(shape, device), sampled)
    lists = difficult_lists(shape, layout)
    inputs = random_index_inputs(shape, layout.num_queries, device)
    inputs.k[lists.unselected] = float("nan")
    teacher = random_teacher(lists.indices)
    teacher[len(teacher) // 2] = 0  # a row without a teacher contributes nothing
    op_call = describe_index_call(inputs, layout, shape.topk)
    picked = session.choice(LOSS, op_call, label)
    expected = expected_loss(inputs, lists, teacher)

    def judge(part: Part, loss, dq, dk, dweights):
        expected.compare(part, loss, dq, dk, dweights)
        part.require((dk[lists.unselected] == 0).all(), "dk of an unselected key is not 0")
        part.require((dq[lists.empty] == 0).all(), "dq of an empty row is not 0")

    for pair in session.available(LOSS, op_call, label):
        part = session.part(pair)

        def call(pair=pair):
            return _loss_and_gradients(inputs, lists, teacher, layout, pair)

        done = session.examine(part, call, lambda *result, p=part: judge(p, *result))
        if done is not None and session.timed and session.lost is None:
            _time_loss(session, shape, part, pair)
        session.file("indexer loss", label, shape, (part,), pair[1].name == picked)


def _loss_and_gradients(inputs, lists, teacher, layout, pair):
    """Return the loss and the gradients of q, k and weights."""
    q, k, weights = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.weights))
    loss = sparse_indexer_loss(
        IndexerInputs(q, k, weights, inputs.relu),
        lists.indices,
        teacher,
        layout,
        topk_length=lists.length,
        policy=named(pair),
    )
    return loss.detach(), *torch.autograd.grad(loss, [q, k, weights])


def _time_loss(session: Session, shape: Shape, part: Part, pair) -> None:
    """Note the time of loss and gradients with as many query rows as a training step has."""
    device = session.device
    whole = layout_of(shape, device)
    layout = layout_of_tokens(
        whole, torch.arange(shape.seq - shape.timed_rows, shape.seq, device=device)
    )
    lists = full_lists(shape, device)
    inputs = random_index_inputs(shape, shape.timed_rows, device)
    teacher = random_teacher(lists.indices)

    def call():
        return _loss_and_gradients(inputs, lists, teacher, layout, pair)

    def judge(*result):
        for name, x in zip(("loss", "dq", "dk", "dweights"), result, strict=True):
            part.require(torch.isfinite(x).all(), f"{name} at full size not finite")

    session.full_size(part, "loss and gradients", call, judge)
