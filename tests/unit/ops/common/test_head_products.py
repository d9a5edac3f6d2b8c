"""Products of every head with its own weight: values, gradients, no transposed copies."""

import pytest
import torch

from megatron_dsa.ops.common.head_products import head_products
from tests.helpers import leaf, relative_error


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("strided", [False, True])
def test_against_einsum(device, tokens, strided):
    x = leaf(tokens, 3, 10, seed=1, device=device, dtype=torch.float64)
    weights = leaf(3, 6, 5, seed=2, device=device, dtype=torch.float64)
    gradient = leaf(3, tokens, 5, seed=3, device=device, dtype=torch.float64).detach()
    gradient = gradient.transpose(0, 1) if strided else gradient.transpose(0, 1).contiguous()
    own = x[..., 4:] if strided else x[..., 4:].contiguous()
    out = head_products(own, weights)
    wanted = torch.einsum("tha,hab->thb", own, weights)
    assert out.is_contiguous()
    found = torch.autograd.grad(out, (x, weights), gradient, retain_graph=True)
    expected = torch.autograd.grad(wanted, (x, weights), gradient)
    for a, b in zip((out, *found), (wanted, *expected), strict=True):
        assert a.shape == b.shape and (relative_error(a, b) < 1e-14 or not b.any())


def test_gradient_of_transposed_weights_has_their_strides():
    stored = leaf(3, 5, 6, seed=2, dtype=torch.float64)
    weights = stored.transpose(1, 2)
    x = leaf(7, 3, 6, seed=1, dtype=torch.float64)
    out = head_products(x, weights)
    (found,) = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
    assert found.stride() == weights.stride()
    expected = torch.einsum("tha,hba->thb", x, stored).square().sum()
    pairs = (torch.autograd.grad(y, stored)[0] for y in (out.square().sum(), expected))
    assert relative_error(*pairs) < 1e-14


@pytest.mark.parametrize("wanted", [0, 1])
def test_frozen(wanted):
    tensors = [leaf(4, 2, 3, seed=1), leaf(2, 3, 5, seed=2)]
    tensors[1 - wanted].requires_grad_(False)
    head_products(*tensors).sum().backward()
    assert tensors[1 - wanted].grad is None and tensors[wanted].grad.is_contiguous()
