"""Products with weights of all heads, of which every tensor-parallel rank holds some.

By rows, a rank attends with all heads, so MLA's absorbed up projections need the weights of all
ranks. They are gathered for the product and once more in its backward: kept, they would take 34 MB
per layer of DeepSeek-V3.2. Their gradient is summed over ranks in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from megatron_dsa.numerics.arithmetic import bmm
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.parallel.gather import start_gather, start_sum


def head_product(x: torch.Tensor, weight: torch.Tensor, group=None) -> torch.Tensor:
    """Return ``x[:, h] @ weight[h]`` for every head.

    Args:
        x: ``[rows, H, A]``.
        weight: ``[H, A, B]``, or ``[H / ranks, A, B]`` if ``group`` is given: of the heads of this
            rank, which come in the order of ranks.
        group: the ranks that share the heads.

    Returns:
        ``[rows, H, B]`` in the dtype of ``x``.
    """
    if group is None:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    return _HeadProduct.apply(x, weight, group)


class _HeadProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        everything = start_gather(weight, group).wait()
        return torch.bmm(x.transpose(0, 1), everything).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = dweight = None
        # What needs no message is computed while the weights travel.
        weights = start_gather(weight, ctx.group) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            own = bmm(x.permute(1, 2, 0), grad.transpose(0, 1))
            dweight = start_sum(own, ctx.group)
        if weights is not None:
            dx = torch.bmm(grad.transpose(0, 1), weights.wait().transpose(1, 2)).transpose(0, 1)
        return dx, None if dweight is None else dweight.wait().to(weight.dtype), None
