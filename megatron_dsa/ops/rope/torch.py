"""Query norm and rope in torch: any device, any dims, temporary memory bounded by a budget."""

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, rows_in_budget
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES


def norm_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    inplace: bool = False,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """Return ``x [rows, H, D]`` normalised over ``D`` and rotated, in the dtype of x.

    Differentiable in x. ``cos, sin``: ``[rows, R / 2]``. ``inplace`` is ignored.
    """
    return _NormRope.apply(x, cos, sin, eps, workspace_bytes)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """Return ``x [rows, H, D]`` rotated (back, if ``inverse``), in the dtype of x.

    Differentiable in x. ``cos, sin``: ``[rows, R / 2]``.
    """
    return _Rotate.apply(x, cos, sin, inverse, workspace_bytes)


def _chunks(x: torch.Tensor, workspace_bytes: int):
    """Yield slices of rows whose temporaries (up to five copies) fit the budget."""
    per_row = 5 * x.shape[1] * x.shape[2] * accumulation_dtype(x.dtype).itemsize
    rows = rows_in_budget(workspace_bytes, per_row)
    for first in range(0, x.shape[0], rows):
        yield slice(first, first + rows)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Rotate the last dims of ``x`` in place and return it; ``x`` is in the accumulation dtype."""
    tail = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    a, b = tail[..., 0::2], tail[..., 1::2]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if inverse:
        sin = -sin
    first = a * cos - b * sin
    b.copy_(a * sin + b * cos)
    a.copy_(first)
    return x


def _rotated(x, cos, sin, inverse, workspace_bytes):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows in _chunks(x, workspace_bytes):
        part = x[rows].to(accumulation_dtype(x.dtype), copy=True)
        y[rows] = _turn(part, cos[rows], sin[rows], inverse).to(x.dtype)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse, workspace_bytes):
        ctx.save_for_backward(cos, sin)
        ctx.rest = (not inverse, workspace_bytes)
        return _rotated(x, cos, sin, inverse, workspace_bytes)

    @staticmethod
    def backward(ctx, dy):
        # Through apply, so that the gradient can be differentiated again.
        dx = _Rotate.apply(dy, *ctx.saved_tensors, *ctx.rest)
        return dx, None, None, None, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, eps, workspace_bytes):
        dtype = accumulation_dtype(x.dtype)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty(x.shape[:2], dtype=dtype)
        for rows in _chunks(x, workspace_bytes):
            part = x[rows].to(dtype, copy=True)
            torch.rsqrt(part.square().mean(-1) + eps, out=rstd[rows])
            part.mul_(rstd[rows][..., None])
            y[rows] = _turn(part, cos[rows], sin[rows], False).to(x.dtype)
        ctx.save_for_backward(y, rstd, cos, sin)
        ctx.workspace_bytes = workspace_bytes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, rstd, cos, sin = ctx.saved_tensors
        dx = torch.empty_like(y)
        for rows in _chunks(y, ctx.workspace_bytes):
            out, grad = y[rows].to(rstd.dtype), dy[rows].to(rstd.dtype)
            # A rotation keeps inner products, so one rotation of the difference is enough.
            part = grad - out * (grad * out).mean(-1, keepdim=True)
            part.mul_(rstd[rows][..., None])
            dx[rows] = _turn(part, cos[rows], sin[rows], True).to(dx.dtype)
        return dx, None, None, None, None
