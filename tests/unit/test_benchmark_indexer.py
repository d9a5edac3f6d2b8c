"""The benchmark of the indexer: its checks find wrong results, and its rows are whole."""

import csv
import dataclasses

import pytest
import torch

from benchmarks import indexer, indexer_bundled, indexer_dense
from benchmarks.timing import ERROR_LIMIT
from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import indexer_topk, sparse_indexer_loss
from megatron_dsa.sequence.layout import bshd_layout


def test_quick_run(tmp_path):
    table = tmp_path / "indexer.csv"
    options = ["--quick", "--ways", "torch", "--teacher-heads", "3", "--output", str(table)]
    indexer.run(indexer.parse(options))
    rows = list(csv.DictReader(table.open()))
    assert [(r["operation"], r["lists"]) for r in rows] == [
        ("select", ""), ("loss", "sorted"), ("loss", "clustered"),
        ("dense", ""),
    ]  # fmt: skip
    assert all(r["status"] == "ok" and float(r["median_ms"]) > 0 for r in rows)
    assert all(f"{name}=torch" in rows[0]["ran"] for name in indexer.OPERATIONS["select"])


def test_fp8_selects_through_candidates(tmp_path, monkeypatch):
    """Where our kernels are left out, torch's scores stand in."""
    monkeypatch.setattr(indexer, "named", lambda operation, way: ())
    table = tmp_path / "indexer.csv"
    options = ["--quick", "--ways", "fp8", "--operations", "select", "--rows", "300"]
    indexer.run(indexer.parse([*options, "--output", str(table)]))
    (row,) = csv.DictReader(table.open())
    assert row["status"] == "ok" and "indexer_listed_scores=" in row["ran"]


def test_bundled_dense_loss_is_ours(tmp_path):
    inputs = indexer.draw(40, 4, 128, torch.device("cpu"))
    inputs = dataclasses.replace(
        inputs, q=inputs.q.requires_grad_(), k=inputs.k.requires_grad_(),
        weights=inputs.weights.requires_grad_(),
    )  # fmt: skip
    teacher = indexer_dense.Teacher.draw(40, 3, torch.device("cpu"))
    layout = bshd_layout(40, 1, torch.device("cpu"))
    ours = indexer_dense.ours(inputs, teacher, layout, Policy())
    theirs = indexer_dense.bundled(inputs, teacher)
    for got, want in zip(ours, theirs, strict=True):
        assert (got - want).norm() < ERROR_LIMIT * want.norm()
    assert indexer_dense.error(inputs, teacher, ours) < ERROR_LIMIT
    assert indexer_dense.error(inputs, teacher, [2 * g for g in ours]) > ERROR_LIMIT


def test_a_way_that_cannot_run_is_a_row(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("cuDNN may run here")
    table = tmp_path / "indexer.csv"
    options = ["--quick", "--ways", "cudnn", "--operations", "select", "--output", str(table)]
    indexer.run(indexer.parse(options))
    (row,) = csv.DictReader(table.open())
    assert row["status"] == "failed" and "cudnn" in row["reason"]


@pytest.mark.parametrize("operation", ["select", "loss"])
def test_bundled_indexer_without_a_gpu_is_a_row(operation, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("it runs here")
    table = tmp_path / "indexer.csv"
    options = ["--quick", "--ways", "megatron", "--operations", operation, "--lists", "clustered"]
    indexer.run(indexer.parse([*options, "--output", str(table)]))
    (row,) = csv.DictReader(table.open())
    assert row["status"] == "failed" and row["way"] == "megatron"
    assert "needs a CUDA GPU" in row["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [700, 9000])
def test_bundled_indexer_is_ours(rows):
    """Selection and gradients, with blocks of rows that are cut off, and short lists."""
    device, topk = torch.device("cuda"), 512
    inputs = indexer.draw(rows, 64, 128, device)
    layout = bshd_layout(rows, 1, device)
    found = indexer_bundled.select(inputs, topk)
    assert indexer.selection_error(inputs, topk, found, ascending=False) < 1e-5
    indices, _ = indexer_topk(inputs, layout, topk, policy=Policy())
    teacher = torch.rand(indices.shape, device=device).masked_fill_(indices < 0, 0.0)
    scores = indexer_bundled.selected_scores(inputs, indices)
    theirs = indexer_bundled.loss_gradients(inputs, indices, teacher, scores)
    assert indexer.loss_error(inputs, indices, teacher, theirs) < ERROR_LIMIT
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.weights)]
    value = sparse_indexer_loss(inputs, indices, teacher, layout, policy=Policy())
    for ours, other in zip(torch.autograd.grad(value, tensors), theirs, strict=True):
        assert (ours.double() - other.double()).norm() < ERROR_LIMIT * ours.double().norm()


def test_order_of_a_selection():
    inputs = indexer.draw(40, 4, 128, torch.device("cpu"))
    layout = bshd_layout(40, 1, torch.device("cpu"))
    indices = indexer_topk(inputs, layout, 8, policy=Policy(fused=False))[0].flip(1)
    assert indexer.selection_error(inputs, 8, indices) == float("inf")
    assert indexer.selection_error(inputs, 8, indices, ascending=False) < 1e-5


def test_checks_find_wrong_results():
    rows, topk = 80, 8
    inputs = indexer.draw(rows, 4, 128, torch.device("cpu"))
    layout = bshd_layout(rows, 1, torch.device("cpu"))
    indices, _ = indexer_topk(inputs, layout, topk, policy=Policy(fused=False))
    assert indexer.selection_error(inputs, topk, indices) < 1e-5
    worst = indexer.scores64(inputs, rows - 1).argsort()
    wrong = indices.clone()
    wrong[-1] = worst[:topk].sort().values
    assert indexer.selection_error(inputs, topk, wrong) > 0.1
    wrong[-1, 1] = wrong[-1, 0]
    assert indexer.selection_error(inputs, topk, wrong) == float("inf")

    teacher = torch.rand(indices.shape).masked_fill_(indices < 0, 0.0)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.weights)]
    value = sparse_indexer_loss(inputs, indices, teacher, layout, policy=Policy(fused=False))
    gradients = torch.autograd.grad(value, tensors)
    assert indexer.loss_error(inputs, indices, teacher, gradients) < ERROR_LIMIT
    halved = [g / 2 for g in gradients]
    assert indexer.loss_error(inputs, indices, teacher, halved) > ERROR_LIMIT
