"""Compressor pooling in Triton: every row is read once, and every gradient written once.

A tile is ``[groups, positions, channels]``. Channels are spread over the threads of a warp first,
then groups over the rest, so that with few positions a thread holds all of them and the softmax
needs no exchange between threads; with many positions (``BLOCK_G == 1``) warps share them.

Backward: the program of a group writes the last ``d`` channels of its own rows and the first ``d``
of the previous group's rows. What nobody would write is zeroed: the first ``d`` channels of a group
without a successor by the group's own program, rows in no group by ``_zero_gaps``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.compressor import CompressorProblem, Groups

#: Scores start the running maximum here: unlike -inf it can be subtracted from -inf.
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)

# Sizes that follow the batch, and slices of index tensors, must not compile kernels again.
_PER_BATCH = ["first_row", "position", "groups", "row_step", "parts"]


@triton.jit
def _exp(x):
    """Exponential in two instructions: ``tl.exp`` takes three more to keep denormal results."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _tile(values, scores, ape, v_stride, s_stride, row, place, column, use, WIDTH: tl.constexpr):
    """Values and scores in fp32, 0 and -inf where ``use`` is false."""
    u = tl.load(values + row * v_stride + column, mask=use, other=0.0)
    s = tl.load(scores + row * s_stride + column, mask=use, other=float("-inf"))
    # Spread over the groups before it is loaded, or it would change its layout in shared memory.
    bias = tl.load(
        ape + place * WIDTH + column + tl.zeros_like(row).to(tl.int32), mask=use, other=0.0
    )
    return u.to(tl.float32), s.to(tl.float32) + bias


@triton.jit
def _tiles(
    values, scores, ape, v_stride, s_stride, first, position, row_step, place, column,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tiles of a group's own positions and, with overlap, of those of the previous group."""
    inside = (place < RATIO) & (column < D)
    row = first + place * row_step.to(tl.int64)
    use = inside & (first >= 0)
    u, s = _tile(
        values, scores, ape, v_stride, s_stride, row, place, column + (WIDTH - D), use, WIDTH
    )
    if OVERLAP:
        row -= RATIO * row_step.to(tl.int64)
        use = use & (position > 0)
        v, t = _tile(values, scores, ape, v_stride, s_stride, row, place, column, use, WIDTH)
        return u, s, v, t
    else:
        return u, s, u, s


@triton.jit
def _fold(top, total, pooled, u, s, v, t, OVERLAP: tl.constexpr):
    """Add tiles to a softmax sum over positions, all ``[groups, channels]``."""
    new = tl.maximum(top, tl.max(s, 1))
    if OVERLAP:
        new = tl.maximum(new, tl.max(t, 1))
    p = _exp(s - new[:, None])
    shrink = _exp(top - new)
    total = total * shrink + tl.sum(p, 1)
    pooled = pooled * shrink + tl.sum(p * u, 1)
    if OVERLAP:
        p = _exp(t - new[:, None])
        total += tl.sum(p, 1)
        pooled += tl.sum(p * v, 1)
    return new, total, pooled


@triton.jit(do_not_specialize=_PER_BATCH)
def _forward(
    values, scores, ape, first_row, position, out, groups, row_step, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_G`` slots and ``BLOCK_D`` channels."""
    slot = tl.program_id(0) // parts * BLOCK_G + tl.arange(0, BLOCK_G)
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(first_row + slot, mask=slot < groups, other=-1).to(tl.int64)[:, None, None]
    at = tl.load(position + slot, mask=slot < groups, other=0)[:, None, None]
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    top = tl.full([BLOCK_G, BLOCK_D], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    pooled = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, RATIO, BLOCK_P):
        place = (start + tl.arange(0, BLOCK_P))[None, :, None]
        u, s, v, t = _tiles(
            values, scores, ape, v_stride, s_stride, first, at, row_step, place, column,
            D, RATIO, OVERLAP, WIDTH,
        )  # fmt: skip
        top, total, pooled = _fold(top, total, pooled, u, s, v, t, OVERLAP)
    pooled = pooled / tl.where(total == 0.0, 1.0, total)
    at = out + slot.to(tl.int64)[:, None] * D + channel[None, :]
    mask = (slot < groups)[:, None] & (channel < D)[None, :]
    tl.store(at, pooled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_gradients(
    dvalues, dscores, u, s, top, weight, pooled, row, column, use, WIDTH: tl.constexpr
):
    """Write the gradients of a tile; return that of its scores in fp32."""
    dvalue = _exp(s - top) * weight
    dscore = dvalue * (u - pooled)
    at = row * WIDTH + column
    tl.store(dvalues + at, dvalue.to(dvalues.dtype.element_ty), mask=use)
    tl.store(dscores + at, dscore.to(dscores.dtype.element_ty), mask=use)
    return dscore


@triton.jit(do_not_specialize=[*_PER_BATCH, "programs"])
def _backward(
    values, scores, ape, first_row, position, dout, dvalues, dscores, partial,
    groups, row_step, programs, v_stride, s_stride, parts,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``programs`` programs share the slots of ``BLOCK_D`` channels and ``BLOCK_P`` positions."""
    chunks: tl.constexpr = (RATIO + BLOCK_P - 1) // BLOCK_P
    # Neighbours in the grid read neighbouring channels of the same rows.
    channel = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    chunk = tl.program_id(0) // parts % chunks
    program = tl.program_id(0) // (parts * chunks)
    column = tl.max_contiguous(channel, VEC)[None, None, :]
    place = (chunk * BLOCK_P + tl.arange(0, BLOCK_P))[None, :, None]
    inside = (place < RATIO) & (column < D)
    step = row_step.to(tl.int64)
    dape = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    dape_previous = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], tl.float32)
    for block in range(program, tl.cdiv(groups, BLOCK_G), programs):
        slot = block * BLOCK_G + tl.arange(0, BLOCK_G)
        first = tl.load(first_row + slot, mask=slot < groups, other=-1).to(tl.int64)
        at = tl.load(position + slot, mask=slot < groups, other=0)
        use_out = (first >= 0)[:, None] & (channel < D)[None, :]
        gradient = tl.load(
            dout + slot.to(tl.int64)[:, None] * D + channel[None, :], mask=use_out, other=0.0
        ).to(tl.float32)
        if OVERLAP:
            after = slot + 1
            follows = tl.load(first_row + after, mask=after < groups, other=-1) >= 0
            follows = follows & (tl.load(position + after, mask=after < groups, other=0) > 0)
            last = (~follows)[:, None, None]
        first = first[:, None, None]
        at = at[:, None, None]
        top = tl.full([BLOCK_G, BLOCK_D], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        pooled = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        if chunks > 1:
            for start in range(0, RATIO, BLOCK_P):
                any_place = (start + tl.arange(0, BLOCK_P))[None, :, None]
                u, s, v, t = _tiles(
                    values, scores, ape, v_stride, s_stride, first, at, row_step, any_place,
                    column, D, RATIO, OVERLAP, WIDTH,
                )  # fmt: skip
                top, total, pooled = _fold(top, total, pooled, u, s, v, t, OVERLAP)
        u, s, v, t = _tiles(
            values, scores, ape, v_stride, s_stride, first, at, row_step, place, column,
            D, RATIO, OVERLAP, WIDTH,
        )  # fmt: skip
        if chunks == 1:
            top, total, pooled = _fold(top, total, pooled, u, s, v, t, OVERLAP)
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        pooled = (pooled * scale)[:, None]
        top, weight = top[:, None], (scale * gradient)[:, None]
        use = inside & (first >= 0)
        row = first + place * step
        dape += _store_gradients(
            dvalues, dscores, u, s, top, weight, pooled, row, column + (WIDTH - D), use,
            WIDTH,
        )  # fmt: skip
        if OVERLAP:
            dape_previous += _store_gradients(
                dvalues, dscores, v, t, top, weight, pooled, row - RATIO * step, column,
                use & (at > 0), WIDTH,
            )  # fmt: skip
            at_last = row * WIDTH + column
            zero = tl.zeros([BLOCK_G, BLOCK_P, BLOCK_D], dvalues.dtype.element_ty)
            tl.store(dvalues + at_last, zero, mask=use & last)
            tl.store(dscores + at_last, zero, mask=use & last)
    place = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    at_partial = partial + (program * RATIO + place)[:, None] * WIDTH + channel[None, :]
    mask = (place < RATIO)[:, None] & (channel < D)[None, :]
    tl.store(at_partial + (WIDTH - D), tl.sum(dape, 0), mask=mask)
    if OVERLAP:
        tl.store(at_partial, tl.sum(dape_previous, 0), mask=mask)


@triton.jit(do_not_specialize=["first_row", "rows", "groups", "row_step"])
def _zero_gaps(
    dvalues, dscores, first_row, rows, groups, row_step,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Zero the rows that are in no group."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = groups // row_step
    # A row's group has this number, or the one before (see Groups).
    number = row // row_step // RATIO
    near = first_row + row % row_step * slots + number
    here = tl.load(near, mask=(row < rows) & (number < slots), other=-1)
    before = tl.load(near - 1, mask=(row < rows) & (number > 0) & (number <= slots), other=-1)
    # Rows of other batch elements lie between those of a group, so this counts rows, not positions.
    span = RATIO * row_step
    inside = (here >= 0) & (here <= row) & (row - here < span)
    inside = inside | ((before >= 0) & (row - before < span))
    gap = (row < rows) & ~inside
    if tl.max(gap.to(tl.int32), 0) > 0:
        zero = tl.zeros([BLOCK_R, BLOCK_C], dvalues.dtype.element_ty)
        for start in range(0, WIDTH, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            mask = gap[:, None] & (column < WIDTH)[None, :]
            tl.store(dvalues + at, zero, mask=mask)
            tl.store(dscores + at, zero, mask=mask)


#: Programs of the backward that fit on a multiprocessor at once, by their registers.
_RESIDENT_FEW, _RESIDENT_MANY = 3, 2


def _many(problem: CompressorProblem) -> bool:
    """Whether several warps share the positions of a group."""
    return problem.ratio > 16


def _blocks(problem: CompressorProblem) -> dict[str, int]:
    """Tile sizes and warps, chosen by the registers of the backward.

    Few positions: 16 elements per thread and part, 4 channels at a time, all positions of a group
    in one thread; a row gives 256 bytes. Many: 32 elements, 128 bytes of a row.
    """
    positions = min(triton.next_power_of_2(problem.ratio), 128)
    channels = min(triton.next_power_of_2(problem.dim), 64 if _many(problem) else 128)
    groups = max(1, 2048 // (positions * channels))
    return {
        "BLOCK_P": positions,
        "BLOCK_G": groups,
        "BLOCK_D": channels,
        "VEC": 8 if _many(problem) else 4,
        "num_warps": max(1, min(8, positions * groups * channels // 512)),
    }


def _sizes(problem: CompressorProblem) -> dict[str, int]:
    width = problem.values.shape[1]
    return {
        "D": problem.dim, "RATIO": problem.ratio, "OVERLAP": problem.overlap, "WIDTH": width
    }  # fmt: skip


def _programs(problem: CompressorProblem, blocks: int, others: int) -> int:
    """Programs that share the ``blocks`` of slots; each of them adds one term to ``dape``.

    As many as run at the same time: more would only make more partial sums (1.6 MB for the ratio
    4 and 8.6 MB for the ratio 128 on 132 multiprocessors) and leave a ragged last wave.
    """
    processors = 2
    if problem.values.is_cuda:
        device = problem.values.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    resident = _RESIDENT_MANY if _many(problem) else _RESIDENT_FEW
    return min(blocks, triton.cdiv(resident * processors, others))


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scores, ape, problem):
        groups = problem.groups
        ape, first_row, position = (
            x.contiguous() for x in (ape, groups.first_row, groups.position)
        )
        ctx.save_for_backward(values, scores, ape, first_row, position)
        ctx.rest = (groups.row_step, problem.ratio, problem.overlap, problem.workspace_bytes)
        slots, dim = first_row.shape[0], problem.dim
        out = values.new_empty(slots, dim)
        block = _blocks(problem)
        if slots > 0:
            parts = triton.cdiv(dim, block["BLOCK_D"])
            _forward[(triton.cdiv(slots, block["BLOCK_G"]) * parts,)](
                values, scores, ape, first_row, position, out, slots, groups.row_step,
                values.stride(0), scores.stride(0), parts, **_sizes(problem), **block,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, dout):
        values, scores, ape, first_row, position = ctx.saved_tensors
        row_step, *rest = ctx.rest
        problem = CompressorProblem(
            values, scores, ape, Groups(first_row, position, row_step), *rest
        )
        dvalues = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        dscores = torch.empty_like(dvalues)
        (rows, width), slots, ratio = values.shape, first_row.shape[0], problem.ratio
        if slots > 0 and rows > 0:
            block = _blocks(problem)
            slot_blocks = triton.cdiv(slots, block["BLOCK_G"])
            parts = triton.cdiv(problem.dim, block["BLOCK_D"])
            others = parts * triton.cdiv(ratio, block["BLOCK_P"])
            programs = _programs(problem, slot_blocks, others)
            partial = ape.new_empty(programs, ratio, width, dtype=torch.float32)
            # Without the bound a multiprocessor would hold one program of many positions.
            registers = 128 if _many(problem) else None
            _backward[(programs * others,)](
                values, scores, ape, first_row, position, dout.contiguous(), dvalues, dscores,
                partial, slots, row_step, programs, values.stride(0), scores.stride(0), parts,
                **_sizes(problem), **block, maxnreg=registers,
            )  # fmt: skip
            dape = partial.sum(0).to(ape.dtype)
        else:
            dape = torch.zeros_like(ape)
        if rows > 0:
            _zero_gaps[(triton.cdiv(rows, 64),)](
                dvalues, dscores, first_row, rows, slots, row_step, RATIO=ratio, WIDTH=width,
                BLOCK_R=64, BLOCK_C=128,
            )  # fmt: skip
        return dvalues, dscores, dape, None


def compress(problem: CompressorProblem) -> torch.Tensor:
    """Return ``pooled [G, d]`` in the dtype of the values; bf16, fp16 or fp32.

    Differentiable in values, scores and ape, and deterministic.
    """
    if problem.values.dtype == torch.float64:
        raise ConfigError(
            "values must not be float64 for the Triton kernels, which sum in float32: use the "
            "torch implementation (ops.compressor.unfused)."
        )
    return _Compress.apply(problem.values, problem.scores, problem.ape, problem)
