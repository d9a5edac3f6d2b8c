"""The family ``indexer``: its checks find wrong results, and its peer computes the same."""

import dataclasses

import pytest
import torch

from benchmarks import indexer
from benchmarks.indexer import bundled, checks, dense
from benchmarks.settings import Settings, Work
from benchmarks.verify import ERROR_LIMIT
from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import indexer_topk, sparse_indexer_loss
from megatron_dsa.errors import ImplementationError
from megatron_dsa.sequence.layout import bshd_layout


def test_bundled_dense_loss_is_ours():
    inputs = checks.draw(40, 4, 128, torch.device("cpu"))
    inputs = dataclasses.replace(
        inputs, q=inputs.q.requires_grad_(), k=inputs.k.requires_grad_(),
        weights=inputs.weights.requires_grad_(),
    )  # fmt: skip
    teacher = dense.Teacher.draw(40, 3, torch.device("cpu"))
    layout = bshd_layout(40, 1, torch.device("cpu"))
    ours = dense.ours(inputs, teacher, layout, Policy())
    theirs = dense.bundled(inputs, teacher)
    for got, want in zip(ours, theirs, strict=True):
        assert (got - want).norm() < ERROR_LIMIT * want.norm()
    assert dense.error(inputs, teacher, ours) < ERROR_LIMIT
    assert dense.error(inputs, teacher, [2 * g for g in ours]) > ERROR_LIMIT


def test_fp8_selects_through_candidates(monkeypatch):
    """Where our kernels are left out, torch's scores stand in."""
    monkeypatch.setattr(indexer, "named", lambda operation, way: ())
    case = indexer.Case(300, heads=4, topk=16, workspace_mib=1)
    measurer = indexer.prepare(case, torch.device("cpu"), Settings("cpu", repeats=1))
    ((part, result),) = measurer.measure(Work("select", indexer.FP8))
    assert part == "select" and result["status"] == "ok"
    assert "indexer_listed_scores=" in result["ran"]


def test_a_way_that_cannot_run_says_why():
    if torch.cuda.is_available():
        pytest.skip("they may run here")
    case = indexer.Case(64, heads=4, topk=16)
    measurer = indexer.prepare(case, torch.device("cpu"), Settings("cpu"))
    for work, reason in (
        (Work("select", "cudnn"), "wrong GPU"), (Work("select", "megatron"), "needs a CUDA GPU"),
        (Work("loss:sorted", "megatron"), "keys behind the query"),
    ):  # fmt: skip
        with pytest.raises(ImplementationError, match=reason):
            list(measurer.measure(work))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [700, 9000])
def test_bundled_indexer_is_ours(rows):
    """Selection and gradients, with blocks of rows that are cut off, and short lists."""
    device, topk = torch.device("cuda"), 512
    inputs = checks.draw(rows, 64, 128, device)
    layout = bshd_layout(rows, 1, device)
    found = bundled.select(inputs, topk)
    assert checks.selection_error(inputs, topk, found, ascending=False) < 1e-5
    indices, _ = indexer_topk(inputs, layout, topk, policy=Policy())
    teacher = torch.rand(indices.shape, device=device).masked_fill_(indices < 0, 0.0)
    scores = bundled.selected_scores(inputs, indices)
    theirs = bundled.loss_gradients(inputs, indices, teacher, scores)
    assert checks.loss_error(inputs, indices, teacher, theirs) < ERROR_LIMIT
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.weights)]
    value = sparse_indexer_loss(inputs, indices, teacher, layout, policy=Policy())
    for ours, other in zip(torch.autograd.grad(value, tensors), theirs, strict=True):
        assert (ours.double() - other.double()).norm() < ERROR_LIMIT * ours.double().norm()


def test_order_of_a_selection():
    inputs = checks.draw(40, 4, 128, torch.device("cpu"))
    layout = bshd_layout(40, 1, torch.device("cpu"))
    indices = indexer_topk(inputs, layout, 8, policy=Policy(fused=False))[0].flip(1)
    assert checks.selection_error(inputs, 8, indices) == float("inf")
    assert checks.selection_error(inputs, 8, indices, ascending=False) < 1e-5


def test_checks_find_wrong_results():
    rows, topk = 80, 8
    inputs = checks.draw(rows, 4, 128, torch.device("cpu"))
    layout = bshd_layout(rows, 1, torch.device("cpu"))
    indices, _ = indexer_topk(inputs, layout, topk, policy=Policy(fused=False))
    assert checks.selection_error(inputs, topk, indices) < 1e-5
    worst = checks.scores64(inputs, rows - 1).argsort()
    wrong = indices.clone()
    wrong[-1] = worst[:topk].sort().values
    assert checks.selection_error(inputs, topk, wrong) > 0.1
    wrong[-1, 1] = wrong[-1, 0]
    assert checks.selection_error(inputs, topk, wrong) == float("inf")

    teacher = torch.rand(indices.shape).masked_fill_(indices < 0, 0.0)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.weights)]
    value = sparse_indexer_loss(inputs, indices, teacher, layout, policy=Policy(fused=False))
    gradients = torch.autograd.grad(value, tensors)
    assert checks.loss_error(inputs, indices, teacher, gradients) < ERROR_LIMIT
    halved = [g / 2 for g in gradients]
    assert checks.loss_error(inputs, indices, teacher, halved) > ERROR_LIMIT
