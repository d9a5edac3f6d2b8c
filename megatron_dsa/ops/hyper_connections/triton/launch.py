"""Launches and autograd functions of hyper-connections in Triton.

The forward saves streams, output, and per token the projection, the weights and the factors of
both norms in fp32.
"""

import torch

from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.launch import launch
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.hyper_connections.spec import ReadInputs, WriteInputs
from megatron_dsa.ops.hyper_connections.triton import streams as kernels
from megatron_dsa.ops.hyper_connections.triton import weights
from megatron_dsa.ops.hyper_connections.triton.tiles import (
    SUMMED_COLUMNS,
    TOKENS,
    WEIGHT_WARPS,
    mix_backward_stages,
    project_tiles,
    read_backward_tiles,
    token_warps,
    weight_parts,
)


def read(inputs: ReadInputs) -> tuple[torch.Tensor, ...]:
    return _Read.apply(*_dense(inputs.tensors), inputs.settings)


def head(inputs: ReadInputs) -> torch.Tensor:
    return _Head.apply(*_dense(inputs.tensors), inputs.settings)


def write(inputs: WriteInputs) -> torch.Tensor:
    return _Write.apply(*_dense(inputs.tensors))


def _dense(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _processors(x: torch.Tensor) -> int:
    return processors(x.device) if x.is_cuda else 2


def _weigh(x, fn, base, scale, settings):
    (tokens, n, channels), outputs = x.shape, fn.shape[0]
    eps, norm_eps, iterations = settings
    is_head = outputs == n
    m, rstd, pre = (x.new_empty(tokens, *s, dtype=torch.float32) for s in ((outputs,), (), (n,)))
    post = comb = None
    if not is_head:
        post, comb = (x.new_empty(tokens, *s, dtype=torch.float32) for s in ((n,), (n, n)))
    if tokens == 0:
        return m, rstd, pre, post, comb
    tile, parts, steps = project_tiles(
        tokens, n * channels, outputs, x.element_size(), _processors(x)
    )
    sums = m.new_empty(parts, tokens, outputs)
    squares = m.new_empty(parts, tokens)
    launch(
        weights.project, (ceil_div(tokens, tile["BLOCK_T"]), parts),
        x, fn, sums, squares, tokens, steps,
        WIDTH=n * channels, OUT=outputs, SPLIT=x.dtype == torch.bfloat16, **tile,
    )  # fmt: skip
    launch(
        weights.weigh, (ceil_div(tokens, TOKENS),),
        sums, squares, base, scale, m, rstd, pre, post, comb, tokens, parts, eps, norm_eps,
        WIDTH=n * channels, N=n, HEAD=is_head, ITERATIONS=iterations, BLOCK_T=TOKENS,
        num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return m, rstd, pre, post, comb


def _weigh_backward(kept, base, scale, channels, settings, dpre, dpost, dcomb):
    m, rstd = kept
    tokens, outputs = m.shape
    n = dpre.shape[1]
    is_head = outputs == n
    eps, _norm_eps, iterations = settings
    programs = ceil_div(tokens, TOKENS)
    projected, shrink = torch.empty_like(m), torch.empty_like(rstd)
    partial = m.new_empty(programs, outputs + 3)
    divisors = None if is_head else m.new_empty(programs, 2 * iterations - 1, TOKENS, n)
    launch(
        weights.weigh_backward, (programs,),
        m, rstd, base, scale, dpre, dpost, dcomb, projected, shrink, partial, divisors, tokens,
        eps, WIDTH=n * channels, N=n, HEAD=is_head, ITERATIONS=iterations, BLOCK_T=TOKENS,
        num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return projected, shrink, partial


def _mixed(x, pre, weight, settings):
    tokens, n, channels = x.shape
    normed, rstd = x.new_empty(tokens, channels), pre.new_empty(tokens)
    if tokens:
        launch(
            kernels.mix, (tokens,),
            x, pre, weight, normed, rstd, settings[1],
            C=channels, N=n, BLOCK_C=next_power_of_2(channels),
            num_warps=token_warps(channels),
        )  # fmt: skip
    return normed, rstd


def _mix_backward(x, pre, weight, rstd, dnormed):
    tokens, n, channels = x.shape
    programs = weight_parts(tokens, _processors(x))
    du, dpre = torch.empty_like(dnormed), torch.empty_like(pre)
    partial = pre.new_empty(programs, channels)
    launch(
        kernels.mix_backward, (programs,),
        x, pre, weight, rstd, dnormed, du, dpre, partial, tokens,
        C=channels, N=n, BLOCK_C=next_power_of_2(channels), maxnreg=128,
        STAGES=mix_backward_stages(channels, n, x.element_size()), num_warps=token_warps(channels),
    )  # fmt: skip
    return du, dpre, partial


def _added(fn, weight, of_fn, of_weight, of_rest):
    dfn = of_fn[0] if len(of_fn) == 1 else torch.empty_like(fn)
    dweight, rest = torch.empty_like(weight), of_rest.new_empty(of_rest.shape[1])
    fn_programs = 0 if len(of_fn) == 1 else ceil_div(fn.numel(), SUMMED_COLUMNS[0])
    launch(
        weights.add_parts, (fn_programs + ceil_div(len(weight), SUMMED_COLUMNS[1]) + 1,),
        of_fn, dfn, of_weight, dweight, of_rest, rest,
        len(of_fn), len(of_weight), len(of_rest), fn_programs,
        FN=fn.numel(), C=len(weight), REST=len(rest), FN_COLUMNS=SUMMED_COLUMNS[0],
        C_COLUMNS=SUMMED_COLUMNS[1], REST_COLUMNS=next_power_of_2(len(rest)),
    )  # fmt: skip
    return dfn, dweight, rest


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fn, base, scale, weight, settings):
        m, flat_rstd, pre, post, comb = _weigh(x, fn, base, scale, settings)
        normed, rstd = _mixed(x, pre, weight, settings)
        ctx.save_for_backward(x, fn, base, scale, weight, m, flat_rstd, pre, rstd)
        ctx.settings = settings
        return normed, x, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed, dstreams, dpost, dcomb):
        return _read_backward(ctx, dnormed, dstreams, dpost, dcomb)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return _Read.forward(ctx, *args)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed):
        return _read_backward(ctx, dnormed, None, None, None)


def _read_backward(ctx, dnormed, dstreams, dpost, dcomb):
    x, fn, base, scale, weight, m, flat_rstd, pre, rstd = ctx.saved_tensors
    tokens, n, channels = x.shape
    outputs = fn.shape[0]
    if tokens == 0:
        return torch.empty_like(x), *map(torch.zeros_like, (fn, base, scale, weight)), None
    dnormed, dstreams, dpost, dcomb = (
        None if g is None else g.contiguous() for g in (dnormed, dstreams, dpost, dcomb)
    )
    du, dpre, of_weight = _mix_backward(x, pre, weight, rstd, dnormed)
    projected, shrink, of_rest = _weigh_backward(
        (m, flat_rstd), base, scale, channels, ctx.settings, dpre, dpost, dcomb
    )
    tile, parts, steps = read_backward_tiles(tokens, channels, n, outputs, _processors(x))
    dx = torch.empty_like(x)
    of_fn = fn.new_empty(parts, *fn.shape)
    launch(
        kernels.read_backward, (n * ceil_div(channels, tile["BLOCK_C"]), parts),
        x, du, pre, fn, projected, shrink, dstreams, dx, of_fn, tokens, steps,
        C=channels, N=n, OUT=outputs, SPLIT=x.dtype == torch.bfloat16, **tile,
    )  # fmt: skip
    dfn, dweight, rest = _added(fn, weight, of_fn, of_weight, of_rest)
    return dx, dfn, rest[:outputs], rest[outputs : outputs + len(scale)], dweight, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, x, post, comb):
        tokens, n, channels = x.shape
        out = torch.empty_like(x)
        block = min(1024, next_power_of_2(channels))
        if tokens:
            launch(
                kernels.write, (tokens * ceil_div(channels, block),),
                output, x, post, comb, out, C=channels, N=n, BLOCK_C=block,
                num_warps=max(1, block // 256),
            )  # fmt: skip
        ctx.save_for_backward(output, x, post, comb)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        output, x, post, comb = ctx.saved_tensors
        tokens, n, channels = x.shape
        found = [torch.empty_like(tensor) for tensor in (output, x, post, comb)]
        block = min(1024, next_power_of_2(channels))
        if tokens:
            launch(
                kernels.write_backward, (tokens,),
                output, x, post, comb, dout.contiguous(), *found,
                C=channels, N=n, BLOCK_C=block, VEC=min(8, block), num_warps=max(1, block // 256),
            )  # fmt: skip
        return tuple(found)
