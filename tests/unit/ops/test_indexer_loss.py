"""The indexer losses against one float64 autograd reference: value and every gradient."""

import pytest
import torch

from megatron_dsa.dispatch import Policy, report, reset_report
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    dense_indexer_loss,
    indexer_topk,
    sparse_indexer_loss,
)
from megatron_dsa.ops.indexer_loss import reference
from megatron_dsa.sequence.layout import bshd_layout
from tests.cases.indexer_loss import LAYOUTS, check, reference_scores, visible_rows
from tests.helpers import leaf, relative_error

SMALL = Policy(workspace_bytes=60_000)
SCALE = 0.37  # not 1, so that a scale applied twice shows (trap 7)


def make_inputs(device, dtype=torch.float64, relu=True):
    return IndexerInputs(
        leaf(48, 3, 8, seed=1, device=device, dtype=dtype),
        leaf(48, 8, seed=2, device=device, dtype=dtype),
        leaf(48, 3, seed=3, device=device, dtype=dtype, scale=0.3),
        relu,
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_dense_loss(device, name, relu, key_heads):
    layout, inputs = LAYOUTS[name](device), make_inputs(device, relu=relu)
    q = leaf(48, 4, 12, seed=4, device=device, dtype=torch.float64)
    k = leaf(48, key_heads, 12, seed=5, device=device, dtype=torch.float64)
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE, policy=SMALL)
    copies, scores = reference_scores(inputs)
    mask = visible_rows(layout)
    teacher = reference.dense_teacher(q.double(), k.double(), mask, SCALE)
    check(inputs, copies, loss, reference.kl_sum(scores, teacher, mask), 1e-11)
    assert q.grad is None and k.grad is None  # the loss trains the indexer only


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("k", [5, 60])
def test_sparse_loss(device, name, relu, k):
    layout, inputs = LAYOUTS[name](device), make_inputs(device, relu=relu)
    indices, length = indexer_topk(inputs, layout, k)
    teacher = torch.rand(48, k, dtype=torch.float64, device=device)
    teacher[4] = 0  # a row without any teacher mass contributes nothing
    loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length, policy=SMALL)
    copies, scores = reference_scores(inputs)
    valid = indices >= 0
    gathered = scores.gather(1, indices.clamp_min(0).long())
    check(inputs, copies, loss, reference.kl_sum(gathered, teacher, valid), 1e-11)


def test_sparse_loss_ignores_invalid_entries(device):
    """-1 in the middle and ids past the keys; the rows they would hit are NaN."""
    inputs = make_inputs(device)
    layout = bshd_layout(48, 1, device)
    indices = torch.tensor([[1, -1, 3, 48]], device=device, dtype=torch.int32).repeat(48, 1)
    teacher = torch.rand(48, 4, dtype=torch.float64, device=device)
    poisoned_k = inputs.k.detach().clone()
    poisoned_k[0] = poisoned_k[47] = float("nan")
    poisoned = IndexerInputs(inputs.q, poisoned_k.requires_grad_(), inputs.weights)
    loss = sparse_indexer_loss(poisoned, indices, teacher, layout)
    loss.backward()
    copies, scores = reference_scores(inputs)
    valid = (indices >= 0) & (indices < 48)
    gathered = scores.gather(1, torch.where(valid, indices, 0).long())
    expected = reference.kl_sum(gathered, teacher, valid)
    expected.backward()
    assert relative_error(loss, expected) < 1e-12
    assert relative_error(poisoned_k.grad, copies.k.grad) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(device, dtype):
    """fp32 sums of bf16 inputs: the loss is good to fp32, the gradients to the inputs' rounding."""
    layout, inputs = bshd_layout(48, 1, device), make_inputs(device, dtype)
    q = leaf(48, 4, 12, seed=4, device=device, dtype=dtype)
    k = leaf(48, 1, 12, seed=5, device=device, dtype=dtype)
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE)
    copies, scores = reference_scores(inputs)
    mask = visible_rows(layout)
    teacher = reference.dense_teacher(q.double(), k.double(), mask, SCALE)
    expected = reference.kl_sum(scores, teacher, mask)
    assert loss.dtype == torch.float32
    assert relative_error(loss, expected) < 1e-5
    check(inputs, copies, loss, expected, 1e-5 if dtype == torch.float32 else 8e-3)


def test_perfect_student_has_no_loss(device):
    """KL(p || p) is 0 and so is its gradient: the teacher is normalised, not just summed."""
    inputs, layout = make_inputs(device), bshd_layout(48, 1, device)
    indices, length = indexer_topk(inputs, layout, 8)
    _, scores = reference_scores(inputs)
    gathered = scores.gather(1, indices.clamp_min(0).long()).detach()
    gathered = gathered.masked_fill(indices < 0, float("-inf"))
    teacher = torch.softmax(gathered, -1) * 4  # four heads' worth of mass
    loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length)
    loss.backward()
    assert abs(float(loss)) < 1e-12
    assert float(inputs.q.grad.norm()) < 1e-12


def test_value_without_gradients(device):
    """Under no_grad the value is the same and nothing is kept."""
    layout, inputs = bshd_layout(48, 1, device), make_inputs(device)
    q = leaf(48, 4, 12, seed=4, device=device, dtype=torch.float64)
    k = leaf(48, 1, 12, seed=5, device=device, dtype=torch.float64)
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE)
    with torch.no_grad():
        value = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE)
    assert not value.requires_grad and torch.equal(value, loss.detach())


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_forms_its_gradients(add, fused):
    """One call of one operation, without another for the gradients."""
    if fused:
        add("sparse_indexer_loss", lambda original: original)
    inputs, layout = make_inputs("cpu"), bshd_layout(48, 1, torch.device("cpu"))
    indices, length = indexer_topk(inputs, layout, 5)
    teacher = torch.rand(48, 5, dtype=torch.float64)
    reset_report()
    value = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length)
    assert report() == {"sparse_indexer_loss": {"made_up" if fused else "torch": 1}}
    copies, scores = reference_scores(inputs)
    gathered = scores.gather(1, indices.clamp_min(0).long())
    check(inputs, copies, value, reference.kl_sum(gathered, teacher, indices >= 0), 1e-11)
