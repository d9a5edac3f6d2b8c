"""Compressor pooling in Triton: every row is read once, and every gradient written once.

The kernels of few positions compute the softmax again in the backward; those of many positions
leave its sums, which are small beside the rows (see the two files). Either backward writes partial
sums of the gradient of ``ape``; :func:`_finish_gradients` adds them in a fixed order, and zeros
rows that are in no group.

The operation moves bytes and little else. What decides its speed is how many bytes each
multiprocessor has in flight (40 kB and more), and hence registers: see :class:`Launch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_dsa.errors import ConfigError
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.ops.compressor.inputs import CompressorInputs
from megatron_dsa.ops.compressor.triton import few_positions as few
from megatron_dsa.ops.compressor.triton import many_positions as many
from megatron_dsa.sequence.compressed import Groups

#: More positions than this are shared by threads.
FEW_POSITIONS = 16


@triton.jit
def _sum_partials(
    partial, dape, program, programs, size,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add ``programs`` rows of ``size`` partial sums, in a fixed order."""
    column = program * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for start in range(0, programs, BLOCK_S):
        row = start + tl.arange(0, BLOCK_S)
        at = row.to(tl.int64)[:, None] * size + column[None, :]
        mask = (row < programs)[:, None] & (column < size)[None, :]
        total += tl.load(partial + at, mask=mask, other=0.0)
    tl.store(dape + column, tl.sum(total, 0).to(dape.dtype.element_ty), mask=column < size)


@triton.jit
def _zero_gaps(
    dvalues, dscores, first_row, program, rows, groups, row_step,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Zero those of ``BLOCK_R`` rows that are in no group."""
    row = program * BLOCK_R + tl.arange(0, BLOCK_R)
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
        block: tl.constexpr = 128
        zero = tl.zeros([BLOCK_R, block], dvalues.dtype.element_ty)
        for start in range(0, WIDTH, block):
            column = start + tl.arange(0, block)
            at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            mask = gap[:, None] & (column < WIDTH)[None, :]
            tl.store(dvalues + at, zero, mask=mask)
            tl.store(dscores + at, zero, mask=mask)


@triton.jit(do_not_specialize=["first_row", "programs", "rows", "groups", "row_step"])
def _finish_gradients(
    partial, dape, dvalues, dscores, first_row, programs, rows, groups, row_step,
    RATIO: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """What is left after the backward, in one launch: the first programs add, the others zero."""
    size: tl.constexpr = RATIO * WIDTH
    adding: tl.constexpr = (size + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    if program < adding:
        _sum_partials(partial, dape, program, programs, size, BLOCK_S, BLOCK_C)
    else:
        _zero_gaps(
            dvalues, dscores, first_row, program - adding, rows, groups, row_step,
            RATIO, WIDTH, BLOCK_R,
        )  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Shape of one kernel's programs.

    Attributes:
        tile: constants of the kernel: ``BLOCK_P`` positions (of a thread in the forward of many
            positions, else of a tile), ``BLOCK_G`` groups or ``SLICES`` of one group, ``BLOCK_D``
            channels, ``VEC`` neighbouring channels per thread, ``STAGES`` blocks in flight.
        warps: warps per program.
        resident: programs per multiprocessor; 0: one program per block.
        registers: bound on the registers of a thread, or None.
    """

    tile: dict[str, int]
    warps: int
    resident: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        options = {**self.tile, "num_warps": self.warps}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


def is_few(inputs: CompressorInputs) -> bool:
    """Whether a thread holds all positions of a group."""
    return inputs.ratio <= FEW_POSITIONS


def forward_launch(inputs: CompressorInputs) -> Launch:
    """How the forward runs."""
    if is_few(inputs):
        tile, elements = _few_tile(inputs, 128)
        return Launch(tile, _warps(elements // 16), resident=0)
    # 4 positions x 8 channels per thread. Many small programs: one waits while others load.
    slices = min(triton.next_power_of_2(inputs.ratio) // 4, 16)
    channels = min(triton.next_power_of_2(inputs.dim), 32)
    tile = {"SLICES": slices, "BLOCK_P": 4, "BLOCK_D": channels, "VEC": 8}
    return Launch(tile, _warps(slices * channels // 8), resident=6, registers=168)


def backward_launch(inputs: CompressorInputs) -> Launch:
    """How the backward runs."""
    if is_few(inputs):
        tile, elements = _few_tile(inputs, 64)
        return Launch(tile, _warps(elements // 8), resident=8, registers=128)
    positions = min(triton.next_power_of_2(inputs.ratio), 32)
    channels = min(triton.next_power_of_2(inputs.dim), 128)
    tile = {"BLOCK_P": positions, "BLOCK_D": channels, "VEC": 8, "STAGES": _stages(inputs)}
    # 2 positions x 8 channels per thread.
    return Launch(tile, _warps(positions * channels // 16), resident=2)


def _stages(inputs: CompressorInputs) -> int:
    """Two blocks ahead while one is at work; wider types fill shared memory with fewer."""
    return 3 if inputs.values.element_size() == 2 else 2


def _few_tile(inputs: CompressorInputs, channels: int) -> tuple[dict[str, int], int]:
    """Tile of a program with up to ``channels`` channels in a warp, and how many elements it has.

    512 elements where positions are few: many small programs keep more bytes in flight than few
    large ones.
    """
    positions = triton.next_power_of_2(inputs.ratio)
    vector = channels // 32
    channels = min(triton.next_power_of_2(inputs.dim), channels)
    groups = max(1, 512 // (positions * channels))
    tile = {"BLOCK_P": positions, "BLOCK_G": groups, "BLOCK_D": channels, "VEC": vector}
    return tile, positions * groups * channels


def _warps(threads: int) -> int:
    return max(1, min(8, threads // 32))


def _sizes(inputs: CompressorInputs) -> dict[str, int]:
    width = inputs.values.shape[1]
    return {
        "D": inputs.dim, "RATIO": inputs.ratio, "OVERLAP": inputs.overlap, "WIDTH": width
    }  # fmt: skip


def _programs(inputs: CompressorInputs, launch: Launch, blocks: int, others: int) -> int:
    """Programs that share the ``blocks`` of slots, where ``others`` share their channels.

    As many as run at the same time: in the backward more would only make more partial sums (2 MB
    for the ratio 4 and 4 MB for the ratio 128 on 132 multiprocessors).
    """
    if launch.resident == 0:
        return blocks
    processors = 2
    if inputs.values.is_cuda:
        device = inputs.values.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(blocks, max(1, launch.resident * processors // others))


def softmax_sums(inputs: CompressorInputs, out: torch.Tensor) -> list[torch.Tensor]:
    """Return memory for what the backward needs of the softmax: nothing of few positions."""
    return [] if is_few(inputs) else [torch.empty_like(out, dtype=torch.float32) for _ in range(2)]


def _run_forward(inputs: CompressorInputs, out: torch.Tensor) -> list[torch.Tensor]:
    """Write the pooled rows; return what the backward needs of the softmax."""
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, dim = out.shape
    launch = forward_launch(inputs)
    parts = triton.cdiv(dim, launch.tile["BLOCK_D"])
    blocks = triton.cdiv(slots, launch.tile.get("BLOCK_G", 1))
    programs = _programs(inputs, launch, blocks, parts)
    softmax = softmax_sums(inputs, out)
    kernel = few.pool_few if is_few(inputs) else many.pool_many
    if slots > 0:
        kernel[(programs * parts,)](
            values, scores, inputs.ape, groups.first_row, groups.position, out, *softmax,
            slots, groups.row_step, programs, values.stride(0), scores.stride(0), parts,
            **_sizes(inputs), **launch.options(),
        )  # fmt: skip
    return softmax


def _run_backward(inputs, dout, softmax, dvalues, dscores) -> torch.Tensor:
    """Write the gradients of rows in groups; return ``partial [programs, ratio, width]``."""
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, width = groups.first_row.shape[0], values.shape[1]
    if slots == 0 or values.shape[0] == 0:
        return values.new_empty(0, inputs.ratio, width, dtype=torch.float32)
    launch = backward_launch(inputs)
    parts = triton.cdiv(inputs.dim, launch.tile["BLOCK_D"])
    others, blocks = parts, triton.cdiv(slots, launch.tile.get("BLOCK_G", 1))
    if not is_few(inputs):
        others *= triton.cdiv(inputs.ratio, launch.tile["BLOCK_P"]) * (width // inputs.dim)
    programs = _programs(inputs, launch, blocks, others)
    partial = values.new_empty(programs, inputs.ratio, width, dtype=torch.float32)
    kernel = few.pool_few_backward if is_few(inputs) else many.pool_many_backward
    kernel[(programs * others,)](
        values, scores, inputs.ape, groups.first_row, groups.position, dout, *softmax,
        dvalues, dscores, partial,
        slots, groups.row_step, programs, values.stride(0), scores.stride(0), parts,
        **_sizes(inputs), **launch.options(),
    )  # fmt: skip
    return partial


def _run_finish(inputs, partial, dvalues, dscores) -> torch.Tensor:
    """Zero rows in no group; return the gradient of ``ape``."""
    rows, width = dvalues.shape
    dape = torch.empty_like(inputs.ape)
    # Few columns per program where there are few, so that many programs share the work.
    columns = min(128, max(8, triton.next_power_of_2(dape.numel() // 128)))
    blocks = triton.cdiv(dape.numel(), columns) + triton.cdiv(rows, 64)
    _finish_gradients[(blocks,)](
        partial, dape, dvalues, dscores, inputs.groups.first_row, partial.shape[0], rows,
        inputs.groups.first_row.shape[0], inputs.groups.row_step,
        RATIO=inputs.ratio, WIDTH=width,
        BLOCK_S=4096 // columns, BLOCK_C=columns, BLOCK_R=64,
    )  # fmt: skip
    return dape


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scores, ape, inputs):
        groups = inputs.groups
        ape, first_row, position = (
            x.contiguous() for x in (ape, groups.first_row, groups.position)
        )
        ctx.rest = (groups.row_step, inputs.ratio, inputs.overlap, inputs.workspace_bytes)
        inputs = _inputs(values, scores, ape, first_row, position, ctx.rest)
        out = values.new_empty(first_row.shape[0], inputs.dim)
        softmax = _run_forward(inputs, out)
        ctx.save_for_backward(values, scores, ape, first_row, position, *softmax)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        values, scores, ape, first_row, position, *softmax = ctx.saved_tensors
        inputs = _inputs(values, scores, ape, first_row, position, ctx.rest)
        dvalues = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        dscores = torch.empty_like(dvalues)
        partial = _run_backward(inputs, dout.contiguous(), softmax, dvalues, dscores)
        dape = _run_finish(inputs, partial, dvalues, dscores)
        return dvalues, dscores, dape, None


def _inputs(values, scores, ape, first_row, position, rest) -> CompressorInputs:
    row_step, *rest = rest
    return CompressorInputs(values, scores, ape, Groups(first_row, position, row_step), *rest)


def compress(inputs: CompressorInputs) -> torch.Tensor:
    """Return ``pooled [G, d]`` in the dtype of the values; bf16, fp16 or fp32.

    Differentiable in values, scores and ape, and deterministic.
    """
    if inputs.values.dtype == torch.float64:
        raise ConfigError(
            "values must not be float64 for the Triton kernels, which sum in float32: use the "
            "torch implementation (ops.compressor.torch)."
        )
    return _Compress.apply(inputs.values, inputs.scores, inputs.ape, inputs)
