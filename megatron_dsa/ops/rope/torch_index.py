"""Rotation of index queries and keys in torch: any device, any dims, a bounded workspace."""

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, rows_in_budget, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.rope.signs import hadamard_signs


def rotate_index(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: bool,
    neighbours: bool,
    transform: bool,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    transposed: bool = False,
) -> torch.Tensor:
    """Return ``x [tokens, H, D]`` rotated and, with ``transform``, transformed, in the dtype of x.

    Differentiable in x. ``cos, sin``: ``[tokens, R / 2]``. ``transposed``: the way back, without a
    gradient.
    """
    if transposed:
        kind = first, neighbours, transform
        return _rotated(x.detach(), cos, sin, kind, workspace_bytes, back=True)
    return _RotateIndex.apply(x, cos, sin, (first, neighbours, transform), workspace_bytes)


class _RotateIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, kind, workspace_bytes):
        ctx.save_for_backward(cos, sin)
        ctx.rest = kind, workspace_bytes
        return _rotated(x, cos, sin, kind, workspace_bytes, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        kind, workspace_bytes = ctx.rest
        dx = _rotated(dy, cos, sin, kind, workspace_bytes, back=True)
        return dx, None, None, None, None


def _rotated(x, cos, sin, kind, workspace_bytes: int, back: bool) -> torch.Tensor:
    transform = kind[2]
    dtype = accumulation_dtype(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    # The part, its transform and up to three copies of what is rotated.
    per_token = 5 * x.shape[1] * x.shape[2] * dtype.itemsize
    for rows in slices(len(x), rows_in_budget(workspace_bytes, per_token)):
        part = x[rows].to(dtype, copy=True)
        if back and transform:
            part = _transformed(part)
        _turn(part, cos[rows], sin[rows], kind, back)
        if transform and not back:
            part = _transformed(part)
        y[rows] = part.to(y.dtype)
    return y


def _transformed(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    return (x @ hadamard_signs(size, x.dtype, x.device)).mul_(size**-0.5)


def _turn(x: torch.Tensor, cos, sin, kind, back: bool) -> None:
    """Rotate the first or last dims of ``x`` in place; it is in the accumulation dtype."""
    first, neighbours, _ = kind
    size = 2 * cos.shape[1]
    rotated = x[..., :size] if first else x[..., x.shape[-1] - size :]
    places = neighbours, neighbours and not first
    (a, b), (left, right) = (_pairs(rotated, each) for each in (places[::-1] if back else places))
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if back:
        sin = -sin
    turned = a * cos - b * sin, a * sin + b * cos
    left.copy_(turned[0])
    right.copy_(turned[1])


def _pairs(x: torch.Tensor, neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second members of all pairs, views."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
