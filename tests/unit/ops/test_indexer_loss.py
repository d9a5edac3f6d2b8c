"""The sparse indexer loss against float64 autograd: value and every gradient."""

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.indexer_topk.spec import index_scores
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.testing.cases import Lists
from megatron_dsa.testing.comparison import INDEXER_LOSS
from megatron_dsa.testing.indexer_loss import expected_loss
from tests.cases.indexer_loss import LAYOUTS, check
from tests.helpers import leaf, relative_error

SMALL = Policy(workspace_bytes=60_000)


def make_inputs(device, relu=True):
    dtype = torch.float64
    return IndexerInputs(
        leaf(48, 3, 8, seed=1, device=device, dtype=dtype),
        leaf(48, 8, seed=2, device=device, dtype=dtype),
        leaf(48, 3, seed=3, device=device, dtype=dtype, scale=0.3),
        relu,
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("k", [5, 60])
def test_sparse_loss(device, name, relu, k):
    layout, inputs = LAYOUTS[name](device), make_inputs(device, relu=relu)
    indices, length = indexer_topk(inputs, layout, k)
    teacher = torch.rand(48, k, dtype=torch.float64, device=device)
    teacher[4] = 0  # without teacher mass a query contributes nothing
    loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length, policy=SMALL)
    expected = expected_loss(inputs, Lists(indices, length, 48), teacher)
    check(inputs, loss, expected, INDEXER_LOSS[torch.float64])


def test_sparse_loss_ignores_invalid_entries(device):
    inputs = make_inputs(device)
    layout = bshd_layout(48, 1, device)
    indices = torch.tensor([[1, -1, 3, 48]], device=device, dtype=torch.int32).repeat(48, 1)
    teacher = torch.rand(48, 4, dtype=torch.float64, device=device)
    poisoned_k = inputs.k.detach().clone()
    poisoned_k[0] = poisoned_k[47] = float("nan")
    poisoned = IndexerInputs(inputs.q, poisoned_k.requires_grad_(), inputs.weights)
    loss = sparse_indexer_loss(poisoned, indices, teacher, layout)
    loss.backward()
    expected = expected_loss(inputs, Lists(indices, None, 48), teacher)
    assert relative_error(loss, expected.loss) < 1e-12
    assert relative_error(poisoned_k.grad, expected.k) < 1e-12


def errors_of_rounded_inputs(relu, seed):
    """Return relative errors of the gradients of q, k and weights for inputs rounded to bf16."""
    tokens, device = 256, torch.device("cpu")
    layout = bshd_layout(tokens, 1, device)
    shapes = ((tokens, 8, 32), (tokens, 32), (tokens, 8))
    exact = [leaf(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in exact]
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.rand(tokens, 64, dtype=torch.float64, generator=generator)
    indices, length = indexer_topk(IndexerInputs(*exact, relu), layout, 64)
    for tensors in (exact, rounded):
        inputs = IndexerInputs(tensors[0], tensors[1], tensors[2] * 0.01, relu)
        loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length)
        loss.backward()
    return [relative_error(y.grad, x.grad) for x, y in zip(exact, rounded, strict=True)]


@pytest.mark.parametrize("relu", [True, False])
def test_rounded_inputs(relu):
    """Without relu, gradients are as good as the inputs; the relu adds heads that change sides.
    Mean over five teachers: a single one gives 3 to 4 %.
    """
    errors = torch.tensor([errors_of_rounded_inputs(relu, seed) for seed in range(5)]).mean(0)
    if relu:
        assert (errors[:2] > 1e-2).all() and (errors[:2] < 4e-2).all(), errors
    else:
        assert (errors < 6e-3).all(), errors


def test_perfect_student_has_no_loss(device):
    """The teacher must be normalised, not only summed."""
    inputs, layout = make_inputs(device), bshd_layout(48, 1, device)
    indices, length = indexer_topk(inputs, layout, 8)
    scores = index_scores(inputs.q, inputs.k, inputs.weights)
    gathered = scores.gather(1, indices.clamp_min(0).long()).detach()
    gathered = gathered.masked_fill(indices < 0, float("-inf"))
    teacher = torch.softmax(gathered, -1) * 4  # four heads' mass
    loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length)
    loss.backward()
    assert abs(float(loss)) < 1e-12
    assert float(inputs.q.grad.norm()) < 1e-12


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_forms_its_gradients(add, fused):
    if fused:
        add("sparse_indexer_loss", lambda original: original)
    inputs, layout = make_inputs("cpu"), bshd_layout(48, 1, torch.device("cpu"))
    indices, length = indexer_topk(inputs, layout, 5)
    teacher = torch.rand(48, 5, dtype=torch.float64)
    reset_report()
    value = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length)
    assert report() == {"sparse_indexer_loss": {"made_up" if fused else "torch": 1}}
    expected = expected_loss(inputs, Lists(indices, length, len(inputs.k)), teacher)
    check(inputs, value, expected, INDEXER_LOSS[torch.float64])
