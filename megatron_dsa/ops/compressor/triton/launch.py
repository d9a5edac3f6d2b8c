"""Launch of the Triton kernels for compressor pooling.

The kernels are memory-bound: each SM needs at least 40 kB in flight, which registers limit.
"""

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.compressor.spec import CompressorInputs
from megatron_dsa.ops.compressor.triton import kernels
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.layout.compressed import Groups

_FEW_POSITIONS = 16


def _tile(inputs: CompressorInputs, channels: int) -> dict[str, int]:
    """Return the tile constants of a kernel.

    Few positions need small tiles, since many programs keep more bytes in flight. A warp splits
    many positions, with 4 channels (8 bytes of a token) per thread.
    """
    positions = next_power_of_2(inputs.ratio)
    vector = channels // 32
    if inputs.ratio > _FEW_POSITIONS:
        channels, vector = 32, 4
    channels = min(next_power_of_2(inputs.dim), channels)
    groups = max(1, 512 // (positions * channels))
    return {"BLOCK_P": positions, "BLOCK_G": groups, "BLOCK_D": channels, "VEC": vector}


def _warps(inputs: CompressorInputs, tile: dict[str, int], elements: int) -> int:
    halves = 2 if inputs.overlap else 1
    threads = tile["BLOCK_G"] * tile["BLOCK_P"] * tile["BLOCK_D"] * halves // elements
    return max(1, min(8, threads // 32))


def _sizes(inputs: CompressorInputs) -> dict[str, int]:
    width = inputs.values.shape[1]
    return {
        "D": inputs.dim, "RATIO": inputs.ratio, "OVERLAP": inputs.overlap, "WIDTH": width
    }  # fmt: skip


def _run_forward(inputs: CompressorInputs, out: torch.Tensor) -> None:
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, dim = out.shape
    tile = _tile(inputs, 128)
    parts = ceil_div(dim, tile["BLOCK_D"])
    blocks = ceil_div(slots, tile["BLOCK_G"])
    if slots > 0:
        launch(
            kernels.pool, (blocks * parts,),
            values, scores, inputs.ape, groups.first_token, groups.position, out,
            slots, groups.token_step, values.stride(0), scores.stride(0), parts,
            **_sizes(inputs), **tile, num_warps=_warps(inputs, tile, 32),
        )  # fmt: skip


def _run_backward(inputs, dout, dvalues, dscores) -> torch.Tensor:
    values, scores, groups = inputs.values, inputs.scores, inputs.groups
    slots, width = groups.first_token.shape[0], values.shape[1]
    if slots == 0 or values.shape[0] == 0:
        return values.new_empty(0, inputs.ratio, width, dtype=torch.float32)
    tile = _tile(inputs, 64)
    warps = _warps(inputs, tile, 16)
    parts = ceil_div(inputs.dim, tile["BLOCK_D"])
    blocks = ceil_div(slots, tile["BLOCK_G"])
    # Launch one wave: an SM holds 16 warps with 128 registers per thread.
    at_once = 16 // warps * (processors(values.device) if values.is_cuda else 2)
    programs = min(blocks, max(1, at_once // parts))
    partial = values.new_empty(programs, inputs.ratio, width, dtype=torch.float32)
    launch(
        kernels.pool_backward, (programs * parts,),
        values, scores, inputs.ape, groups.first_token, groups.position, dout,
        dvalues, dscores, partial,
        slots, groups.token_step, programs, values.stride(0), scores.stride(0), parts,
        **_sizes(inputs), **tile, num_warps=warps, maxnreg=128,
    )  # fmt: skip
    return partial


def _run_finish(inputs, partial, dvalues, dscores) -> torch.Tensor:
    tokens, width = dvalues.shape
    dape = torch.empty_like(inputs.ape)
    columns = min(128, max(8, next_power_of_2(dape.numel() // 128)))
    blocks = ceil_div(dape.numel(), columns) + ceil_div(tokens, 64)
    launch(
        kernels.finish_gradients, (blocks,),
        partial, dape, dvalues, dscores, inputs.groups.first_token, partial.shape[0], tokens,
        inputs.groups.first_token.shape[0], inputs.groups.token_step,
        RATIO=inputs.ratio, WIDTH=width,
        BLOCK_S=4096 // columns, BLOCK_C=columns, BLOCK_R=64,
    )  # fmt: skip
    return dape


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scores, ape, inputs):
        groups = inputs.groups
        ape, first_token, position = (
            x.contiguous() for x in (ape, groups.first_token, groups.position)
        )
        ctx.rest = (groups.token_step, inputs.ratio, inputs.overlap, inputs.workspace_bytes)
        inputs = _inputs(values, scores, ape, first_token, position, ctx.rest)
        out = values.new_empty(first_token.shape[0], inputs.dim)
        _run_forward(inputs, out)
        ctx.save_for_backward(values, scores, ape, first_token, position)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        values, scores, ape, first_token, position = ctx.saved_tensors
        inputs = _inputs(values, scores, ape, first_token, position, ctx.rest)
        dvalues = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        dscores = torch.empty_like(dvalues)
        partial = _run_backward(inputs, dout.contiguous(), dvalues, dscores)
        dape = _run_finish(inputs, partial, dvalues, dscores)
        return dvalues, dscores, dape, None


def _inputs(values, scores, ape, first_token, position, rest) -> CompressorInputs:
    token_step, *rest = rest
    return CompressorInputs(values, scores, ape, Groups(first_token, position, token_step), *rest)


def compress(inputs: CompressorInputs) -> torch.Tensor:
    if inputs.values.dtype == torch.float64:
        raise ConfigError(
            "values must not be float64 for the Triton kernels, which sum in float32: use the "
            "torch implementation (ops.compressor.torch)."
        )
    return _Compress.apply(inputs.values, inputs.scores, inputs.ape, inputs)
