"""An attention layer against a float64 reference with the same weights."""

from collections.abc import Callable

import torch

from tests.helpers import relative_error
from tests.host import attention_module, packed, start


def hidden_states(config, tokens, batch=1):
    """Return random hidden states ``[tokens, batch, hidden]``, a leaf."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, batch, config.hidden_size, generator=generator, dtype=torch.float64)
    return x.to(start(), config.params_dtype).requires_grad_()


def compare(
    config, reference: Callable, tolerance, *, loss, tokens, batch=1, lengths=None, unused=False
):
    """Check output and all gradients of a layer; return it and the reference's result.

    Args:
        reference: takes weights by name and hidden states, float64 leaves; returns ``out`` and
            ``loss``.
        tolerance: relative error of each tensor.
        loss: the indexer's, or ``None``.
        tokens, batch: of the hidden states; ``lengths`` packs them.
        unused: gradients of some parameters may be 0.
    """
    module = attention_module(config).train()
    x = hidden_states(config, tokens, batch)
    params = None if lengths is None else packed(*lengths)
    out, bias = module(x, None, packed_seq_params=params)
    assert bias is None
    weights = {
        name: parameter.detach().cpu().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }
    x64 = x.detach().cpu().double().requires_grad_()
    result = reference(weights, x64)
    assert relative_error(out, result.out) < tolerance
    generator = torch.Generator().manual_seed(12)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(grad.to(out))
    objective = (result.out * grad).sum()
    if loss is not None:
        objective = objective + config.dsa_indexer_loss_coeff * result.loss
    objective.backward()
    assert relative_error(x.grad, x64.grad) < tolerance
    for name, parameter in module.named_parameters():
        expected, got = weights[name].grad, parameter.grad
        if expected is None:
            assert got is None or (unused and got.norm() == 0), name
        elif unused and expected.norm() == 0:
            assert got is None or got.norm() == 0, name
        else:
            assert relative_error(got, expected) < tolerance, name
            assert expected.norm() > 0, name
    return module, result
