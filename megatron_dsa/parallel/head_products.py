"""Products of every head with a weight of its own: MLA's absorbed up projections.

Results and gradients are written where they belong, heads of a token side by side. A plain product
of batches of heads leaves them transposed, and the next kernel copies them.

In sequence mode a rank attends with all heads, so it needs the weights of all tensor-parallel
ranks. They are gathered for the product and once more in its backward: kept, they would take 34 MB
per layer of DeepSeek-V3.2. Their gradient is summed over ranks in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_dsa.numerics.arithmetic import bmm
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.parallel.gather import all_gather_async, reduce_scatter_async


def head_product(x: torch.Tensor, weight: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return ``x[:, h] @ weight[h]`` for every head.

    Args:
        x: ``[tokens, H, A]``, any strides.
        weight: ``[H, A, B]``, or ``[H / ranks, A, B]`` if ``group`` is given: of the heads of this
            rank, which come in the order of ranks.
        group: the ranks that share the heads.

    Returns:
        ``[tokens, H, B]`` in the dtype of ``x``, contiguous.
    """
    return _HeadProduct.apply(x, weight, group)


def absorbed_queries(q: torch.Tensor, w_uk: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return queries in the space of the latents: ``[q[..., :A] @ w_uk ; q[..., A:]]``.

    Args:
        q: ``[tokens, H, A + P]``, the ``P`` dims with rope last.
        w_uk: ``[H, A, R]`` (``[H / ranks, A, R]``), which makes keys of latents.
        group: as of :func:`head_product`.

    Returns:
        ``[tokens, H, R + P]`` in the dtype of ``q``, contiguous.
    """
    return _HeadProduct.apply(q, w_uk, group)


class _HeadProduct(torch.autograd.Function):
    """The first dims of ``x`` are multiplied, the others are copied behind the product."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _multiplied(x, all_gather_async(weight, group).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = dweight = None
        # What needs no message is computed while the weights travel.
        weights = all_gather_async(weight, ctx.group) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            inner, outer = weight.shape[1:]
            own = bmm(x[..., :inner].permute(1, 2, 0), grad[..., :outer].transpose(0, 1))
            dweight = reduce_scatter_async(own, ctx.group)
        if weights is not None:
            dx = _multiplied(grad, weights.wait().transpose(1, 2))
        return dx, None if dweight is None else dweight.wait().to(weight.dtype), None


def _multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner, outer = weight.shape[1:]
    rest = x.shape[2] - inner
    result = x.new_empty(*x.shape[:2], outer + rest)
    product = result[..., :outer].transpose(0, 1)
    torch.bmm(x[..., :inner].transpose(0, 1), weight, out=product)
    if rest:
        result[..., outer:] = x[..., inner:]
    return result
