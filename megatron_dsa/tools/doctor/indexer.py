"""The indexer: selection by every pair of scores and top-k, and its sparse loss with gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megatron_dsa.dispatch.support import OpCall
from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.ops.indexer_topk.api import candidates_for
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.inputs import describe_index_call
from megatron_dsa.sequence.layout import Layout
from megatron_dsa.tools.doctor.cases import (
    difficult_lists,
    full_lists,
    integer_index_inputs,
    layout_of,
    layout_of_rows,
    random_index_inputs,
    sampled_rows,
)
from megatron_dsa.tools.doctor.expected import (
    best_keys,
    expected_loss,
    expected_scores,
    visible_keys,
)
from megatron_dsa.tools.doctor.results import Part
from megatron_dsa.tools.doctor.session import Session, named
from megatron_dsa.tools.doctor.shapes import Shape

SCORES, LISTED, TOPK, LOSS = (
    "indexer_scores",
    "indexer_listed_scores",
    "indexer_topk",
    "sparse_indexer_loss",
)

#: Least share of the float64 selection that a selection from fp32 scores must hold.
LEAST_RECALL = 0.99


class _Selection:
    """Inputs of one selection with what is right for the sampled rows."""

    def __init__(self, inputs: IndexerInputs, layout: Layout, rows: torch.Tensor, topk: int):
        self.inputs, self.layout, self.rows, self.topk = inputs, layout, rows, topk
        self.scores = expected_scores(inputs, rows)
        self.visible = visible_keys(layout, rows)
        self.best = best_keys(self.scores, self.visible, topk)

    def call(self, pairs, fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        policy = named(*pairs)
        if fp8:  # what is judged are its scores; top-k has verdicts of its own
            pairs = (*policy.named, (TOPK, "torch"))
            policy = replace(policy, named=pairs, fp8_selection=True, fp8_least_ratio=0)
        return indexer_topk(self.inputs, self.layout, self.topk, policy=policy)

    def selected(self, part: Part, indices, length) -> torch.Tensor:
        """Check the form of a selection; returns it as bool ``[len(rows), Skv]``."""
        indices, length = indices[self.rows].long(), length[self.rows].long()
        place = torch.arange(self.topk, device=indices.device)
        listed = place < length[:, None]
        wanted = self.visible.sum(-1).clamp_max(self.topk)
        part.require((length == wanted).all(), "wrong number of selected keys")
        part.require(
            ((indices >= 0) == listed).all() and (indices[~listed] == -1).all(),
            "the list is no prefix of keys followed by -1",
        )
        rising = (indices[:, 1:] > indices[:, :-1]) | ~listed[:, 1:]
        part.require(rising.all(), "keys are not distinct and ascending")
        in_range = (indices >= 0) & (indices < self.layout.num_keys)
        part.require(in_range[listed].all(), "a selected key does not exist")
        # A spare column takes what is not listed.
        spare = self.layout.num_keys
        chosen = torch.zeros(len(indices), spare + 1, dtype=torch.bool, device=indices.device)
        chosen.scatter_(1, torch.where(listed & in_range, indices, spare), True)
        chosen = chosen[:, :spare]
        part.require(not (chosen & ~self.visible).any(), "an invisible key is selected")
        return chosen

    def judge_exactly(self, what: str, part: Part, indices, length) -> None:
        """For scores that are exact in fp32: there is one right answer."""
        chosen = self.selected(part, indices, length)
        part.require((chosen == self.best).all(), f"{what}: not the best keys, smallest first")

    def judge(self, part: Part, indices, length) -> None:
        """For scores that round: the best keys but for near-ties."""
        chosen = self.selected(part, indices, length)
        missed = (self.best & ~chosen).sum() / self.best.sum().clamp_min(1)
        recall = 1.0 - float(missed)
        part.figures["recall"] = min(recall, part.figures.get("recall", 1.0))
        part.require(recall >= LEAST_RECALL, f"recall {recall:.3f} < {LEAST_RECALL}")
        # How far below the worst of the best keys is the worst that was selected?
        infinity = float("inf")
        bar = self.scores.masked_fill(~self.best, infinity).amin(-1)
        least = self.scores.masked_fill(~(chosen & self.visible), infinity).amin(-1)
        some = self.best.any(-1) & (least < infinity)
        size = (self.scores.square() * self.visible).sum(-1) / self.visible.sum(-1).clamp_min(1)
        # A row whose scores are all cut to 0 by the relu has no size, and no shortfall either.
        size = torch.where(size > 0, size.sqrt(), 1.0)
        shortfall = ((bar - least) / size)[some].clamp_min(0)
        part.keep_worst("score shortfall", float(shortfall.max()) if some.any() else 0.0)


def check_selection(session: Session, shape: Shape) -> None:
    """File a verdict on every pair of scores and top-k."""
    device, label = session.device, shape.indexer_label()
    layout, rows = layout_of(shape, device), sampled_rows(shape, device)
    inputs = random_index_inputs(shape, shape.seq, device)
    call = describe_index_call(inputs, layout, shape.topk)
    picked = [session.choice(op, call, label) for op in (SCORES, TOPK)]
    usable = [session.available(op, call, label) for op in (SCORES, TOPK)]
    silent = IndexerInputs(torch.zeros_like(inputs.q), inputs.k, inputs.weights)
    cases = [
        _Selection(x, layout, rows, shape.topk)
        for x in (inputs, silent, integer_index_inputs(shape, shape.seq, device))
    ]
    for pairs in [(scores, topk) for scores in usable[0] for topk in usable[1]]:
        part = _select(session, pairs, *cases)
        chosen = [candidate.name for _, candidate in pairs] == picked
        session.file("index selection", label, shape, (part,), chosen)
    _check_fp8(session, shape, call, *cases[:2])


def _check_fp8(session: Session, shape: Shape, op_call: OpCall, ordinary, equal) -> None:
    """File a verdict on every pair of rough (fp8) scores and those that are formed again."""
    label = f"{shape.indexer_label()}, fp8"
    assert op_call.topk is not None
    more = replace(op_call, topk=candidates_for(op_call.topk))
    parts = ((SCORES, replace(more, dtype=FP8)), (LISTED, more))
    picked = [session.choice(op, x, label) for op, x in parts]
    usable = [session.available(op, x, label) for op, x in parts]
    for pairs in [(scores, again) for scores in usable[0] for again in usable[1]]:
        part = session.part(*pairs)

        def call(case=ordinary, pairs=pairs):
            return case.call(pairs, fp8=True)

        def judge_equal(*result, part=part):
            equal.judge_exactly("all scores equal", part, *result)

        done = session.examine(part, call, lambda *result, p=part: ordinary.judge(p, *result))
        if done is not None:
            session.once(part, partial(call, equal), judge_equal, warm=True)
            session.time(part, "selection", call)
        chosen = [candidate.name for _, candidate in pairs] == picked
        session.file("fp8 selection", label, shape, (part,), chosen)


def _select(session: Session, pairs, ordinary, equal, whole) -> Part:
    """Return the verdict on one pair, from three :class:`_Selection`."""
    part = session.part(*pairs)

    def judge_exactly(what: str, case: _Selection):
        return lambda *result: case.judge_exactly(what, part, *result)

    done = session.examine(
        part, lambda: ordinary.call(pairs), lambda *result: ordinary.judge(part, *result)
    )
    if done is not None:
        what = "all scores equal"
        session.once(part, lambda: equal.call(pairs), judge_exactly(what, equal), warm=True)
        what = "many equal scores"
        session.once(part, lambda: whole.call(pairs), judge_exactly(what, whole), warm=True)
        session.time(part, "selection", lambda: ordinary.call(pairs))
    return part


def check_loss(session: Session, shape: Shape) -> None:
    """File a verdict on every sparse loss with its gradients."""
    device, label = session.device, shape.indexer_label()
    layout = layout_of_rows(layout_of(shape, device), sampled_rows(shape, device))
    lists = difficult_lists(shape, layout)
    inputs = random_index_inputs(shape, layout.num_queries, device)
    inputs.k[lists.unselected] = float("nan")
    teacher = _teacher(lists.indices)
    teacher[len(teacher) // 2] = 0  # a row without a teacher contributes nothing
    op_call = describe_index_call(inputs, layout, shape.topk)
    picked = session.choice(LOSS, op_call, label)
    expected = expected_loss(inputs, lists, teacher)

    def judge(part: Part, loss, dq, dk, dweights):
        part.compare("loss", loss, expected.loss)
        part.compare("dq", dq, expected.q)
        part.compare("dk", dk, expected.k)
        part.compare("dweights", dweights, expected.weights)
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


def _teacher(indices: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """Something like a head sum of probabilities ``[R, K]``: positive, not normalised."""
    generator = torch.Generator(indices.device).manual_seed(seed)
    return torch.randn(indices.shape, generator=generator, device=indices.device).exp_()


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
    layout = layout_of_rows(
        whole, torch.arange(shape.seq - shape.timed_rows, shape.seq, device=device)
    )
    lists = full_lists(shape, device)
    inputs = random_index_inputs(shape, shape.timed_rows, device)
    teacher = _teacher(lists.indices)

    def call():
        return _loss_and_gradients(inputs, lists, teacher, layout, pair)

    def judge(*result):
        for name, x in zip(("loss", "dq", "dk", "dweights"), result, strict=True):
            part.require(torch.isfinite(x).all(), f"{name} at full size not finite")

    session.full_size(part, "loss and gradients", call, judge)
