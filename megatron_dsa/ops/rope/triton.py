"""Norm and rope in Triton.

Tensor cores multiply heads by the transform's matrix of signs. Rotated fp32 values are split into
two 16-bit numbers with 16 bits of mantissa together, so the result is rounded once.
"""

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2
from megatron_dsa.ops.common.autograd import differentiable, once_differentiable
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.rope.spec import hadamard_signs

#: Heads per program.
_HEADS = 64
#: Rope tables may be slices, whose alignment must not cause compilations.
_ANY_ALIGNMENT = ["cos", "sin"]
#: Varying sizes must not cause compilations.
_ANY_SIZES = {
    "do_not_specialize": ["heads", "count", "scale"],
    "do_not_specialize_on_alignment": _ANY_ALIGNMENT,
}


@triton.jit
def _turn(
    x, cos, sin, token, stride,
    D: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK_D // 2) - (D // 2 - HALF)
    turned = (pair >= 0) & (pair < HALF)
    at = token * stride + pair
    c = tl.load(cos + at, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + at, mask=turned, other=0.0)[None, :]
    if INVERSE:
        s = -s
    a, b = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
    # Multiplying unrotated dims by 1 and 0 would spread an infinity to its neighbour.
    first = tl.where(turned[None, :], a * c - b * s, a)
    second = tl.where(turned[None, :], a * s + b * c, b)
    return tl.reshape(tl.join(first, second), [BLOCK_H, BLOCK_D])


@triton.jit
def _offsets(
    token_stride, head_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    at = (token * H + head)[:, None] * D + dim[None, :]
    source = token * token_stride + head[:, None] * head_stride + dim[None, :]
    return token, head, at, (head < H)[:, None] & (dim < D)[None, :], source


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _forward(
    x, y, cos, sin, rstd, eps, stride, token_stride, head_stride,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, head, at, mask, source = _offsets(token_stride, head_stride, H, D, BLOCK_H, BLOCK_D)
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
        tl.store(rstd + token * H + head, scale, mask=head < H)
        value = value * scale[:, None]
    value = _turn(value, cos, sin, token, stride, D, HALF, INVERSE, BLOCK_H, BLOCK_D)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _norm_backward(
    y, dy, dx, cos, sin, rstd, stride,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the input gradient; rotations preserve inner products, so it is rotated once."""
    token, head, at, mask, _ = _offsets(0, 0, H, D, BLOCK_H, BLOCK_D)
    out = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(rstd + token * H + head, mask=head < H, other=0.0)
    grad = (grad - out * (tl.sum(grad * out, 1) / D)[:, None]) * scale[:, None]
    grad = _turn(grad, cos, sin, token, stride, D, HALF, True, BLOCK_H, BLOCK_D)
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _columns(START: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return START + index, index < COUNT


@triton.jit
def _load(x, at, inside, column, exists):
    mask = inside[:, None] & exists[None, :]
    return tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, at, inside, column, exists, value):
    mask = inside[:, None] & exists[None, :]
    tl.store(x + at[:, None] + column[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _product(x, signs, like, total):
    """Return ``total + x @ signs``; split fp32 ``x`` into two numbers if ``like`` is 16-bit."""
    dtype: tl.constexpr = like.dtype.element_ty
    signs = signs.to(dtype)
    if dtype == tl.float32:
        return tl.dot(x, signs, total, input_precision="ieee")
    if x.dtype == dtype:
        return tl.dot(x, signs, total)
    high = x.to(dtype)
    low = (x - high.to(tl.float32)).to(dtype)
    return tl.dot(low, signs, tl.dot(high, signs, total))


@triton.jit
def _signs_of(signs, column, exists, D: tl.constexpr):
    return tl.load(
        signs + column[:, None] * D + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0
    )


@triton.jit
def _signs_to(signs, column, exists, D: tl.constexpr):
    return tl.load(
        signs + tl.arange(0, D)[:, None] * D + column[None, :], mask=exists[None, :], other=0.0
    )


@triton.jit
def _angles(cos, sin, token, inside, stride, HALF: tl.constexpr, PAIRS: tl.constexpr):
    pair = tl.arange(0, PAIRS)
    at, mask = token[:, None] * stride + pair[None, :], inside[:, None] & (pair < HALF)[None, :]
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def _heads_of(heads, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, row // heads, row % heads, row < count


@triton.jit(**_ANY_SIZES)
def _index_forward(
    x, y, cos, sin, signs, heads, count, token_stride, head_stride, table_stride, scale,
    D: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, JOINED: tl.constexpr, TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of dims from ``START`` on; multiply by the signs if ``TRANSFORM``.

    Pairs are neighbours in ``x`` if ``NEIGHBOURS`` and in the result if ``JOINED``, otherwise split
    into halves.
    """
    row, token, head, inside = _heads_of(heads, count, BLOCK)
    at, to = token * token_stride + head * head_stride, row * D
    if TRANSFORM:
        total = tl.zeros([BLOCK, D], tl.float32)
    if HALF > 0:
        c, s = _angles(cos, sin, token, inside, table_stride, HALF, PAIRS)
        both, all_exist = _columns(START, 2 * HALF, 2 * PAIRS)
        left, exists = _columns(START, HALF, PAIRS)
        if NEIGHBOURS:
            value = _load(x, at, inside, both, all_exist).to(tl.float32)
            a, b = tl.split(tl.reshape(value, [BLOCK, PAIRS, 2]))
        else:
            a = _load(x, at, inside, left, exists).to(tl.float32)
            b = _load(x, at, inside, left + HALF, exists).to(tl.float32)
        first, second = a * c - b * s, a * s + b * c
        if JOINED:
            value = tl.reshape(tl.join(first, second), [BLOCK, 2 * PAIRS])
            if TRANSFORM:
                total = _product(value, _signs_of(signs, both, all_exist, D), x, total)
            else:
                _store(y, to, inside, both, all_exist, value)
        elif TRANSFORM:
            total = _product(first, _signs_of(signs, left, exists, D), x, total)
            total = _product(second, _signs_of(signs, left + HALF, exists, D), x, total)
        else:
            _store(y, to, inside, left, exists, first)
            _store(y, to, inside, left + HALF, exists, second)
    if REST > 0:
        column, exists = _columns(0 if START > 0 else 2 * HALF, REST, REST_BLOCK)
        value = _load(x, at, inside, column, exists)
        if TRANSFORM:
            total = _product(value, _signs_of(signs, column, exists, D), x, total)
        else:
            _store(y, to, inside, column, exists, value)
    if TRANSFORM:
        every, exists = _columns(0, D, D)
        _store(y, to, inside, every, exists, total * scale)


@triton.jit(**_ANY_SIZES)
def _index_backward(
    dy, dx, cos, sin, signs, heads, count, token_stride, head_stride, table_stride, scale,
    D: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, JOINED: tl.constexpr, TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the Hadamard transform, which is its own inverse, and rotate pairs back."""
    row, token, head, inside = _heads_of(heads, count, BLOCK)
    at, to = token * token_stride + head * head_stride, row * D
    if TRANSFORM:
        every, exists = _columns(0, D, D)
        given = _load(dy, at, inside, every, exists)
    if HALF > 0:
        c, s = _angles(cos, sin, token, inside, table_stride, HALF, PAIRS)
        both, all_exist = _columns(START, 2 * HALF, 2 * PAIRS)
        left, exists = _columns(START, HALF, PAIRS)
        if JOINED:
            if TRANSFORM:
                value = tl.zeros([BLOCK, 2 * PAIRS], tl.float32)
                value = _product(given, _signs_to(signs, both, all_exist, D), dy, value) * scale
            else:
                value = _load(dy, at, inside, both, all_exist).to(tl.float32)
            a, b = tl.split(tl.reshape(value, [BLOCK, PAIRS, 2]))
        elif TRANSFORM:
            zero = tl.zeros([BLOCK, PAIRS], tl.float32)
            a = _product(given, _signs_to(signs, left, exists, D), dy, zero) * scale
            b = _product(given, _signs_to(signs, left + HALF, exists, D), dy, zero) * scale
        else:
            a = _load(dy, at, inside, left, exists).to(tl.float32)
            b = _load(dy, at, inside, left + HALF, exists).to(tl.float32)
        first, second = a * c + b * s, b * c - a * s
        if NEIGHBOURS:
            value = tl.reshape(tl.join(first, second), [BLOCK, 2 * PAIRS])
            _store(dx, to, inside, both, all_exist, value)
        else:
            _store(dx, to, inside, left, exists, first)
            _store(dx, to, inside, left + HALF, exists, second)
    if REST > 0:
        column, exists = _columns(0 if START > 0 else 2 * HALF, REST, REST_BLOCK)
        if TRANSFORM:
            zero = tl.zeros([BLOCK, REST_BLOCK], tl.float32)
            value = _product(given, _signs_to(signs, column, exists, D), dy, zero) * scale
        else:
            value = _load(dy, at, inside, column, exists).to(tl.float32)
        _store(dx, to, inside, column, exists, value)


def _blocks(x: torch.Tensor) -> dict[str, int]:
    """Return blocks of 4096 elements, which need few registers and keep 8 KB in flight."""
    dims = next_power_of_2(x.shape[2])
    heads = max(1, min(next_power_of_2(x.shape[1]), 4096 // dims))
    return {"BLOCK_H": heads, "BLOCK_D": dims, "num_warps": max(1, min(8, heads * dims // 1024))}


def _launch(kernel, x: torch.Tensor, *args, **constants) -> None:
    blocks = _blocks(x)
    programs = x.shape[0] * ceil_div(x.shape[1], blocks["BLOCK_H"])
    if programs > 0 and x.shape[2] > 0:
        launch(kernel, (programs,), *args, H=x.shape[1], D=x.shape[2], **constants, **blocks)


def _tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return _dense(x), cos, sin


def _dense(x: torch.Tensor) -> torch.Tensor:
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
        arguments = _dense(dy), *ctx.saved_tensors, not ctx.inverse
        # Calling `_Rotate.apply` allows second derivatives.
        dx = _Rotate.apply(*arguments) if torch.is_grad_enabled() else _rotated(*arguments)
        return dx, None, None, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, eps, inplace):
        # Return an alias: with mark_dirty, autograd would copy the gradient, since x is a view.
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


def _block(columns: int) -> int:
    return max(16, next_power_of_2(columns))


def _launch_index(kernel, x: torch.Tensor, cos, sin, kind: tuple[bool, bool, bool]) -> torch.Tensor:
    first, neighbours, transform = kind
    tokens, heads, dim = x.shape
    x = _dense(x)
    out = x.new_empty(x.shape)
    half = cos.shape[1]
    rest = dim - 2 * half
    count = tokens * heads
    if count > 0 and dim > 0:
        signs = hadamard_signs(dim, torch.bfloat16, x.device) if transform else x
        launch(
            kernel, (ceil_div(count, _HEADS),),
            x, out, cos, sin, signs, heads, count, x.stride(0), x.stride(1), cos.stride(0),
            dim**-0.5, D=dim, START=0 if first else rest, HALF=half, REST=rest,
            NEIGHBOURS=neighbours, JOINED=neighbours and not first, TRANSFORM=transform,
            BLOCK=_HEADS, PAIRS=_block(half), REST_BLOCK=_block(rest), num_warps=4,
        )  # fmt: skip
    return out


class _RotateIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, kind):
        ctx.save_for_backward(cos, sin)
        ctx.kind = kind
        return _launch_index(_index_forward, x, cos, sin, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _launch_index(_index_backward, dy, *ctx.saved_tensors, ctx.kind), None, None, None


def norm_rope(x, cos, sin, eps, inplace=False, workspace_bytes=None) -> torch.Tensor:
    x, cos, sin = _tables(x.contiguous(), cos, sin)
    return _NormRope.apply(x, cos, sin, float(eps), inplace)


def rotate(x, cos, sin, inverse, workspace_bytes=None) -> torch.Tensor:
    x, cos, sin = _tables(x, cos, sin)
    return (_Rotate.apply if differentiable(x) else _rotated)(x, cos, sin, inverse)


def rotate_index(
    x, cos, sin, first, neighbours, transform, workspace_bytes=None,
    transposed=False,
) -> torch.Tensor:  # fmt: skip
    x, cos, sin = _tables(x, cos, sin)
    kind = first, neighbours, transform
    if transposed:
        return _launch_index(_index_backward, x.detach(), cos, sin, kind)
    if not differentiable(x):
        return _launch_index(_index_forward, x, cos, sin, kind)
    return _RotateIndex.apply(x, cos, sin, kind)
