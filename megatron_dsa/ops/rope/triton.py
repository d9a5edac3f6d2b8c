"""Query norm and rope in Triton: one pass over the heads in either direction.

A program takes some heads of one row, whole, so the tables of the row are read once per program.
A thread holds neighbouring dims, so that both members of a pair meet in its registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.autograd import once_differentiable

# Tables may be slices of larger ones; their alignment must not compile kernels again.
_ANY_ALIGNMENT = ["cos", "sin"]


@triton.jit
def _turn(
    x, cos, sin, row, stride,
    D: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate the last ``2 * HALF`` of ``D`` dims of a tile of heads of one row."""
    pair = tl.arange(0, BLOCK_D // 2) - (D // 2 - HALF)
    turned = (pair >= 0) & (pair < HALF)
    at = row * stride + pair
    c = tl.load(cos + at, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + at, mask=turned, other=0.0)[None, :]
    if INVERSE:
        s = -s
    a, b = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
    # Other dims are not multiplied by 1 and 0: that would spread an infinity to its neighbour.
    first = tl.where(turned[None, :], a * c - b * s, a)
    second = tl.where(turned[None, :], a * s + b * c, b)
    return tl.reshape(tl.join(first, second), [BLOCK_H, BLOCK_D])


@triton.jit
def _place(
    row_stride, head_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the program's row, its heads, their offsets in ``[rows, H, D]`` and a mask.

    The first offsets are those of contiguous heads, the last ones follow the strides.
    """
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    at = (row * H + head)[:, None] * D + dim[None, :]
    source = row * row_stride + head[:, None] * head_stride + dim[None, :]
    return row, head, at, (head < H)[:, None] & (dim < D)[None, :], source


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _forward(
    x, y, cos, sin, rstd, eps, stride, row_stride, head_stride,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate, after the norm if ``NORM``; ``y`` may be ``x``, whose strides are those given."""
    row, head, at, mask, source = _place(row_stride, head_stride, H, D, BLOCK_H, BLOCK_D)
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
        tl.store(rstd + row * H + head, scale, mask=head < H)
        value = value * scale[:, None]
    value = _turn(value, cos, sin, row, stride, D, HALF, INVERSE, BLOCK_H, BLOCK_D)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _norm_backward(
    y, dy, dx, cos, sin, rstd, stride,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of the norm and rope from its output.

    A rotation keeps inner products, so the difference is rotated back, and nothing else.
    """
    row, head, at, mask, _ = _place(0, 0, H, D, BLOCK_H, BLOCK_D)
    out = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row * H + head, mask=head < H, other=0.0)
    grad = (grad - out * (tl.sum(grad * out, 1) / D)[:, None]) * scale[:, None]
    grad = _turn(grad, cos, sin, row, stride, D, HALF, True, BLOCK_H, BLOCK_D)
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)


def _blocks(x: torch.Tensor) -> dict[str, int]:
    """About 4096 elements per program, 32 per thread: 8 KB in flight, in a few registers."""
    dims = triton.next_power_of_2(x.shape[2])
    heads = max(1, min(triton.next_power_of_2(x.shape[1]), 4096 // dims))
    return {"BLOCK_H": heads, "BLOCK_D": dims, "num_warps": max(1, min(8, heads * dims // 1024))}


def _launch(kernel, x: torch.Tensor, *args, **constants) -> None:
    """Start one program per block of heads and row, rows slowest."""
    blocks = _blocks(x)
    programs = x.shape[0] * triton.cdiv(x.shape[1], blocks["BLOCK_H"])
    if programs > 0 and x.shape[2] > 0:
        kernel[(programs,)](*args, H=x.shape[1], D=x.shape[2], **constants, **blocks)


def _tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    """Check the dtype; return x with dense heads, and tables of one stride with dense rows."""
    if x.dtype == torch.float64:
        raise ConfigError(
            "x must not be float64 for the Triton kernels, which compute in float32: use the "
            "torch implementation (ops.rope.torch)."
        )
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return _dense(x), cos, sin


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [rows, H, D]`` with dense heads; where these lie does not matter."""
    return x if x.stride(2) == 1 else x.contiguous()


def _rotated(x, cos, sin, inverse):
    y = x.new_empty(x.shape)
    _launch(
        _forward, x, x, y, cos, sin, None, 0.0, cos.stride(0), x.stride(0), x.stride(1),
        HALF=cos.shape[1], NORM=False, INVERSE=inverse,
    )  # fmt: skip
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _rotated(x, cos, sin, inverse)

    @staticmethod
    def backward(ctx, dy):
        # Through apply, so that the gradient can be differentiated again.
        dx = _Rotate.apply(_dense(dy), *ctx.saved_tensors, not ctx.inverse)
        return dx, None, None, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, eps, inplace):
        # An alias instead of mark_dirty: x is a view of a projection's output, and autograd would
        # copy the whole gradient for an in-place change of a view.
        y = x.detach() if inplace else x.new_empty(x.shape)
        rstd = x.new_empty(x.shape[:2], dtype=torch.float32)
        _launch(
            _forward, x, x, y, cos, sin, rstd, eps, cos.stride(0), x.stride(0), x.stride(1),
            HALF=cos.shape[1], NORM=True, INVERSE=False,
        )  # fmt: skip
        ctx.save_for_backward(y, rstd, cos, sin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, rstd, cos, sin = ctx.saved_tensors
        dx = torch.empty_like(y)
        _launch(
            _norm_backward, y, y, dy.contiguous(), dx, cos, sin, rstd, cos.stride(0),
            HALF=cos.shape[1],
        )  # fmt: skip
        return dx, None, None, None, None


def norm_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    inplace: bool = False,
    workspace_bytes: int | None = None,
) -> torch.Tensor:
    """Return ``x [rows, H, D]`` (bf16, fp16, fp32) normalised over ``D`` and rotated.

    Differentiable in x. ``cos, sin``: fp32 ``[rows, R / 2]``. With ``inplace`` the result takes the
    memory of x, whose content nothing else may need. There are no temporaries to bound.
    """
    x, cos, sin = _tables(x.contiguous(), cos, sin)
    return _NormRope.apply(x, cos, sin, float(eps), inplace)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    workspace_bytes: int | None = None,
) -> torch.Tensor:
    """Return ``x [rows, H, D]`` (bf16, fp16, fp32) rotated (back, if ``inverse``).

    Differentiable in x. ``cos, sin``: fp32 ``[rows, R / 2]``. There are no temporaries to bound.
    """
    x, cos, sin = _tables(x, cos, sin)
    return _Rotate.apply(x, cos, sin, inverse)
