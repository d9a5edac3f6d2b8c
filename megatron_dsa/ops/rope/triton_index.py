"""Rotation of index queries and keys in Triton: one pass over the heads in either direction.

A program takes some heads, of one token or of several. The transform is a product with its matrix
of signs on the matrix units: what was rotated in fp32 enters it as two numbers of 16 bits, whose
sum has 16 bits of mantissa, so that the result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.rope.signs import hadamard_signs

#: Heads of a program.
_HEADS = 64
#: Tables may be slices of larger ones; sizes follow the batch.
_ANY = {
    "do_not_specialize": ["heads", "count", "scale"],
    "do_not_specialize_on_alignment": ["cos", "sin"],
}


@triton.jit
def _columns(START: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return ``COUNT`` columns from ``START`` on, in a block, and which of the block exist."""
    place = tl.arange(0, BLOCK)
    return START + place, place < COUNT


@triton.jit
def _load(x, at, inside, column, exists):
    """Return the columns of some heads, which begin at ``at``."""
    mask = inside[:, None] & exists[None, :]
    return tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, at, inside, column, exists, value):
    mask = inside[:, None] & exists[None, :]
    tl.store(x + at[:, None] + column[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _product(x, signs, like, total):
    """Return ``total + x @ signs``; fp32 becomes two numbers if ``like`` has 16 bits."""
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
    """Return rows of the matrix of signs, ``[columns, D]``."""
    return tl.load(
        signs + column[:, None] * D + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0
    )


@triton.jit
def _signs_to(signs, column, exists, D: tl.constexpr):
    """Return columns of the matrix of signs, ``[D, columns]``."""
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
    """Return the program's heads (as rows ``token * heads + head``), tokens and a mask."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, row // heads, row % heads, row < count


@triton.jit(**_ANY)
def _forward(
    x, y, cos, sin, signs, heads, count, token_stride, head_stride, table_stride, scale,
    D: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, JOINED: tl.constexpr, TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of dims from ``START`` on; multiply by the signs if ``TRANSFORM``.

    Pairs are neighbours in ``x`` if ``NEIGHBOURS``, in what is rotated if ``JOINED``; else halves.
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


@triton.jit(**_ANY)
def _backward(
    dy, dx, cos, sin, signs, heads, count, token_stride, head_stride, table_stride, scale,
    D: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, JOINED: tl.constexpr, TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """The transform, which is its own inverse, and the rotation back."""
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


def _block(columns: int) -> int:
    """Return the size of a block of columns, 16 at least for the matrix units."""
    return max(16, triton.next_power_of_2(columns))


def _launch(kernel, x: torch.Tensor, cos, sin, kind: tuple[bool, bool, bool]) -> torch.Tensor:
    """Return what ``kernel`` makes of ``x [tokens, H, D]``, contiguous."""
    first, neighbours, transform = kind
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(x.shape)
    half = cos.shape[1]
    rest = dim - 2 * half
    count = tokens * heads
    if count > 0 and dim > 0:
        # Without a transform nothing is read from the matrix.
        signs = hadamard_signs(dim, torch.bfloat16, x.device) if transform else x
        kernel[(triton.cdiv(count, _HEADS),)](
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
        return _launch(_forward, x, cos, sin, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _launch(_backward, dy, *ctx.saved_tensors, ctx.kind), None, None, None


def rotate_index(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: bool,
    neighbours: bool,
    transform: bool,
    workspace_bytes: int | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Return ``x [tokens, H, D]`` (bf16, fp16, fp32) rotated and, with ``transform``, transformed.

    Differentiable in x. ``cos, sin``: fp32 ``[tokens, R / 2]``. There are no temporaries to bound.
    ``transposed``: the way back, without a gradient.
    """
    if x.dtype == torch.float64:
        raise ConfigError(
            "x must not be float64 for the Triton kernels, which compute in float32: use the "
            "torch implementation (ops.rope.torch_index)."
        )
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if transposed:
        return _launch(_backward, x.detach(), cos, sin, (first, neighbours, transform))
    return _RotateIndex.apply(x, cos, sin, (first, neighbours, transform))
