"""Compressor pooling in Triton: every row is read once, and every gradient written once.

The backward computes the softmax again and writes partial sums of the gradient of ``ape``;
``finish_gradients`` adds them in a fixed order, and zeros rows that are in no group.

The operation moves bytes and little else. What decides its speed is how many bytes each
multiprocessor has in flight (40 kB and more), and hence registers: see :class:`Launch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.compressor.api import CompressorInputs
from megatron_dsa.ops.compressor.triton import kernels
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.layout.compressed import Groups

#: Up to this many positions lie in one thread.
_FEW_POSITIONS = 16


@dataclass(frozen=True)
class Launch:
    """Shape of one kernel's programs.

    Attributes:
        tile: constants of the kernel: a tile has ``BLOCK_G`` groups, ``BLOCK_P`` positions and
            ``BLOCK_D`` channels; a thread has ``VEC`` neighbouring channels.
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


def forward_launch(inputs: CompressorInputs) -> Launch:
    """How the forward runs: 32 elements per thread."""
    tile = _tile(inputs, 128)
    return Launch(tile, _warps(inputs, tile, 32), resident=0)


def backward_launch(inputs: CompressorInputs) -> Launch:
    """How the backward runs: 16 elements per thread, whose gradients take registers too."""
    tile = _tile(inputs, 64)
    warps = _warps(inputs, tile, 16)
    # 16 warps of 128 registers per thread fill a multiprocessor.
    return Launch(tile, warps, resident=16 // warps, registers=128)


def _tile(inputs: CompressorInputs, channels: int) -> dict[str, int]:
    """Tile of a program with up to ``channels`` channels in a warp where positions are few.

    Few positions make tiles of 512 elements: many small programs keep more bytes in flight than few
    large ones. Many positions share a warp, 4 channels (8 bytes of a row) per thread.
    """
    positions = triton.next_power_of_2(inputs.ratio)
    vector = channels // 32
    if inputs.ratio > _FEW_POSITIONS:
        channels, vector = 32, 4
    channels = min(triton.next_power_of_2(inputs.dim), channels)
    groups = max(1, 512 // (positions * channels))
    return {"BLOCK_P": positions, "BLOCK_G": groups, "BLOCK_D": channels, "VEC": vector}


def _warps(inputs: CompressorInputs, tile: dict[str, int], elements: int) -> int:
    """Warps whose threads have ``elements`` elements of a tile, of both halves with overlap."""
    halves = 2 if inputs.overlap else 1
    threads = tile["BLOCK_G"] * tile["BLOCK_P"] * tile["BLOCK_D"] * halves // elements
    return max(1, min(8, threads // 32))


def _sizes(inputs: CompressorInputs) -> dict[str, int]:
    width = inputs.values.shape[1]
    return {
        "D": inputs.dim, "RATIO": inputs.ratio, "OVERLAP": inputs.overlap, "WIDTH": width
    }  # fmt: skip


def _programs(inputs: CompressorInputs, launch: Launch, blocks: int, parts: int) -> int:
    """Programs of the backward that share ``blocks`` of slots, for each of ``parts`` of channels.

    As many as run at the same time: more would only make more partial sums (2 MB for the ratio 4
    and 4 MB for the ratio 128 on 132 multiprocessors).
    """
    device = inputs.values.device
    count = processors(device) if device.type == "cuda" else 2
    return min(blocks, max(1, launch.resident * count // parts))


def _run_forward(inputs: CompressorInputs, out: torch.Tensor) -> None:
    """Write the pooled rows."""
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, dim = out.shape
    launch = forward_launch(inputs)
    parts = triton.cdiv(dim, launch.tile["BLOCK_D"])
    blocks = triton.cdiv(slots, launch.tile["BLOCK_G"])
    if slots > 0:
        kernels.pool[(blocks * parts,)](
            values, scores, inputs.ape, groups.first_row, groups.position, out,
            slots, groups.row_step, values.stride(0), scores.stride(0), parts,
            **_sizes(inputs), **launch.options(),
        )  # fmt: skip


def _run_backward(inputs, dout, dvalues, dscores) -> torch.Tensor:
    """Write the gradients of rows in groups; return ``partial [programs, ratio, width]``."""
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, width = groups.first_row.shape[0], values.shape[1]
    if slots == 0 or values.shape[0] == 0:
        return values.new_empty(0, inputs.ratio, width, dtype=torch.float32)
    launch = backward_launch(inputs)
    parts = triton.cdiv(inputs.dim, launch.tile["BLOCK_D"])
    blocks = triton.cdiv(slots, launch.tile["BLOCK_G"])
    programs = _programs(inputs, launch, blocks, parts)
    partial = values.new_empty(programs, inputs.ratio, width, dtype=torch.float32)
    kernels.pool_backward[(programs * parts,)](
        values, scores, inputs.ape, groups.first_row, groups.position, dout,
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
    kernels.finish_gradients[(blocks,)](
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
        _run_forward(inputs, out)
        ctx.save_for_backward(values, scores, ape, first_row, position)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        values, scores, ape, first_row, position = ctx.saved_tensors
        inputs = _inputs(values, scores, ape, first_row, position, ctx.rest)
        dvalues = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        dscores = torch.empty_like(dvalues)
        partial = _run_backward(inputs, dout.contiguous(), dvalues, dscores)
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
