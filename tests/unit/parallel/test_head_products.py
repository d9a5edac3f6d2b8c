"""Products of every head with its own weight: values, gradients, and where they are written."""

import pytest
import torch

from megatron_dsa.parallel.head_products import absorbed_queries, head_product
from tests.helpers import leaf, relative_error

HEADS, INNER, OUTER, ROPE = 3, 5, 7, 4


def expected(x, weight):
    """The product of the first dims, then the other dims."""
    inner = weight.shape[1]
    product = torch.einsum("tha,hab->thb", x[..., :inner], weight)
    return torch.cat([product, x[..., inner:]], dim=-1)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("rope", [0, ROPE])
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_a_plain_product(tokens, rope, transposed):
    """Also of strided queries, weights and gradients."""
    function = absorbed_queries if rope else head_product
    x = leaf(tokens, HEADS, INNER + rope, seed=1, dtype=torch.float64)
    if transposed:
        weight = leaf(HEADS, OUTER, INNER, seed=2, dtype=torch.float64)
    else:
        weight = leaf(HEADS, INNER, OUTER, seed=2, dtype=torch.float64)
    grad = leaf(HEADS, tokens, OUTER + rope, seed=3, dtype=torch.float64).detach().transpose(0, 1)
    wide = torch.cat([x, x], dim=-1)[..., : INNER + rope]
    found = []
    for product in (function, expected):
        out = product(wide, weight.transpose(1, 2) if transposed else weight)
        found.append([out, *torch.autograd.grad(out, (x, weight), grad, retain_graph=True)])
    for ours, reference in zip(*found, strict=True):
        assert ours.shape == reference.shape
        assert tokens == 0 or relative_error(ours, reference) < 1e-13
    assert found[0][0].is_contiguous()


def test_the_gradient_of_queries_is_contiguous():
    """The next kernel takes it without a copy, whatever the strides of its own gradient are."""
    x = leaf(9, HEADS, INNER + ROPE, seed=1)
    weight = leaf(HEADS, INNER, OUTER, seed=2)
    strides = []
    x.register_hook(lambda grad: strides.append(grad.stride()))
    grad = torch.ones(HEADS, 9, OUTER + ROPE).transpose(0, 1)
    absorbed_queries(x, weight).backward(grad)
    assert strides == [x.stride()]


def test_bf16_weights_get_a_gradient_that_is_rounded_once():
    x = leaf(300, 1, INNER, seed=1, dtype=torch.bfloat16)
    weight = leaf(1, INNER, OUTER, seed=2, dtype=torch.bfloat16)
    head_product(x, weight).float().square().sum().backward()
    grad = 2 * torch.einsum("tha,hab->thb", x, weight).float()
    exact = torch.einsum("tha,thb->hab", x.double(), grad.bfloat16().double())
    assert weight.grad.dtype == torch.bfloat16
    assert relative_error(weight.grad, exact) < 4e-3
