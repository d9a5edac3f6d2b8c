"""Norm and rope in torch."""

from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.rope.spec import hadamard_signs

#: Type of the arguments ``first``, ``neighbours`` and ``transform`` of ``rotate_index``.
Kind = tuple[bool, bool, bool]
_ROPE: Kind = (False, True, False)


def norm_rope(
    x, cos, sin, eps, inplace=False, workspace_bytes=DEFAULT_WORKSPACE_BYTES
) -> torch.Tensor:
    return _NormRope.apply(x, cos, sin, eps, workspace_bytes)


def rotate(x, cos, sin, inverse, workspace_bytes=DEFAULT_WORKSPACE_BYTES) -> torch.Tensor:
    return _Rotate.apply(x, cos, sin, _ROPE, inverse, workspace_bytes)


def rotate_index(
    x, cos, sin, first, neighbours, transform, workspace_bytes=DEFAULT_WORKSPACE_BYTES,
    transposed=False,
) -> torch.Tensor:  # fmt: skip
    x = x.detach() if transposed else x
    kind = first, neighbours, transform
    return _Rotate.apply(x, cos, sin, kind, transposed, workspace_bytes)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, kind, back, workspace_bytes):
        ctx.save_for_backward(cos, sin)
        ctx.rest = kind, not back, workspace_bytes
        transform, dtype = kind[2], accumulation_dtype(x.dtype)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for tokens in _chunks(x, workspace_bytes):
            part = x[tokens].to(dtype, copy=True)
            if back and transform:
                part = _transformed(part)
            _turn(part, cos[tokens], sin[tokens], kind, back)
            if transform and not back:
                part = _transformed(part)
            y[tokens] = part.to(x.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        # Calling `_Rotate.apply` allows second derivatives.
        return _Rotate.apply(dy, *ctx.saved_tensors, *ctx.rest), *(None,) * 5


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, eps, workspace_bytes):
        dtype = accumulation_dtype(x.dtype)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty(x.shape[:2], dtype=dtype)
        for tokens in _chunks(x, workspace_bytes):
            part = x[tokens].to(dtype, copy=True)
            torch.rsqrt(part.square().mean(-1) + eps, out=rstd[tokens])
            part.mul_(rstd[tokens][..., None])
            _turn(part, cos[tokens], sin[tokens], _ROPE, False)
            y[tokens] = part.to(x.dtype)
        ctx.save_for_backward(y, rstd, cos, sin)
        ctx.workspace_bytes = workspace_bytes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, rstd, cos, sin = ctx.saved_tensors
        dx = torch.empty_like(y)
        for tokens in _chunks(y, ctx.workspace_bytes):
            out, grad = y[tokens].to(rstd.dtype), dy[tokens].to(rstd.dtype)
            # Rotations preserve inner products, so one rotation of the difference suffices.
            part = grad - out * (grad * out).mean(-1, keepdim=True)
            part.mul_(rstd[tokens][..., None])
            _turn(part, cos[tokens], sin[tokens], _ROPE, True)
            dx[tokens] = part.to(dx.dtype)
        return dx, None, None, None, None


def _chunks(x: torch.Tensor, workspace_bytes: int) -> Iterator[slice]:
    per_token = 5 * x.shape[1] * x.shape[2] * accumulation_dtype(x.dtype).itemsize
    return slices(len(x), items_within(workspace_bytes, per_token))


def _transformed(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    return (x @ hadamard_signs(size, x.dtype, x.device)).mul_(size**-0.5)


def _turn(x: torch.Tensor, cos, sin, kind: Kind, back: bool) -> None:
    first, neighbours, _ = kind
    size = 2 * cos.shape[1]
    rotated = x[..., :size] if first else x[..., x.shape[-1] - size :]
    paired = neighbours, neighbours and not first
    (a, b), (left, right) = (_pairs(rotated, each) for each in (paired[::-1] if back else paired))
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if back:
        sin = -sin
    turned = a * cos - b * sin, a * sin + b * cos
    left.copy_(turned[0])
    right.copy_(turned[1])


def _pairs(x: torch.Tensor, neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
