"""Matrix products with a weight per head or group of heads.

The result is contiguous as ``[tokens, heads, dims]``; a plain batched product would need a copy.
"""

import torch

from megatron_dsa.ops.common.autograd import once_differentiable


def write_head_products(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))


def head_products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``x[:, h] @ weights[h]`` for every head.

    Args:
        x: ``[tokens, H, A]``; weights: ``[H, A, B]``, same dtype. Any strides.

    Returns:
        ``[tokens, H, B]`` in the dtype of ``x``, contiguous; differentiable in both inputs.
    """
    return _HeadProducts.apply(x, weights)


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x, weights)
        return _multiplied(x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weights = ctx.saved_tensors
        dx = dweights = None
        if ctx.needs_input_grad[0]:
            dx = _multiplied(grad, weights.transpose(1, 2))
        if ctx.needs_input_grad[1]:
            # Strides of the weights, whose views would copy gradients of other strides.
            dweights = torch.empty_like(weights)
            torch.bmm(x.permute(1, 2, 0), grad.transpose(0, 1), out=dweights)
        return dx, dweights


def _multiplied(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], weights.shape[2])
    write_head_products(x, weights, out)
    return out
