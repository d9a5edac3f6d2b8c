"""Hyper-connections in torch, in chunks of tokens.

Only inputs are saved; the backward recomputes each chunk under autograd.
"""

from collections.abc import Callable, Iterator

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.hyper_connections.spec import ReadInputs, WriteInputs


def read(inputs: ReadInputs) -> tuple[torch.Tensor, ...]:
    return _Read.apply(*inputs.tensors, inputs.settings, inputs.workspace_bytes)


def head(inputs: ReadInputs) -> torch.Tensor:
    return _Head.apply(*inputs.tensors, inputs.settings, inputs.workspace_bytes)


def write(inputs: WriteInputs) -> torch.Tensor:
    return _Write.apply(*inputs.tensors, inputs.workspace_bytes)


def _chunks(streams: torch.Tensor, workspace_bytes: int) -> Iterator[slice]:
    size = streams.shape[1] * streams.shape[2] * accumulation_dtype(streams.dtype).itemsize
    # A chunk needs up to eight copies.
    return slices(len(streams), items_within(workspace_bytes, 8 * size))


def _weights(x, fn, base, scale, settings):
    n, (eps, norm_eps, iterations) = x.shape[1], settings
    flat = x.flatten(1)
    m = flat @ fn.t() * torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    if fn.shape[0] == n:
        return pre, None, None
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def _mixed(x, pre, weight, norm_eps, dtype):
    u = (pre[..., None] * x).sum(1)
    u = u + (u.detach().to(dtype).to(u.dtype) - u.detach())
    return u * torch.rsqrt(u.square().mean(1, keepdim=True) + norm_eps) * weight


def _written(output, x, post, comb):
    return post[..., None] * output[:, None] + torch.einsum("tij,tic->tjc", comb, x)


def _chunk_gradients(
    computed: Callable, tensors: list[torch.Tensor], gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        results = computed(*leaves)
    return torch.autograd.grad(results, leaves, gradients, materialize_grads=True)


def _read(x, fn, base, scale, weight, settings, dtype):
    pre, post, comb = _weights(x, fn, base, scale, settings)
    return _mixed(x, pre, weight, settings[1], dtype), post, comb


def _read_forward(ctx, x, fn, base, scale, weight, settings, workspace_bytes):
    ctx.save_for_backward(x, fn, base, scale, weight)
    ctx.settings, ctx.workspace_bytes = settings, workspace_bytes
    tokens, n, channels = x.shape
    normed = x.new_empty(tokens, channels)
    shapes = ((n,), (n, n)) if fn.shape[0] > n else ()
    weights = [x.new_empty(tokens, *shape, dtype=fn.dtype) for shape in shapes]
    wide = weight.to(fn.dtype)
    for part in _chunks(x, workspace_bytes):
        u, *found = _read(x[part].to(fn.dtype), fn, base, scale, wide, settings, x.dtype)
        normed[part] = u.to(x.dtype)
        for total, each in zip(weights, found, strict=False):
            total[part] = each
    return (normed, *weights) if weights else (normed, None, None)


def _read_backward(ctx, dnormed, dstreams, dpost, dcomb):
    x, fn, base, scale, weight = ctx.saved_tensors
    dx, dtype = torch.empty_like(x), fn.dtype
    parameters = [fn, base, scale, weight.to(dtype)]
    totals = [torch.zeros_like(p) for p in parameters]

    def computed(x_part, fn, base, scale, weight):
        results = _read(x_part, fn, base, scale, weight, ctx.settings, x.dtype)
        return [result for result in results if result is not None]

    for part in _chunks(x, ctx.workspace_bytes):
        given = [dnormed[part].to(dtype)]
        if dpost is not None:
            given += [dpost[part], dcomb[part]]
        wide = [x[part].to(dtype), *parameters]
        of_x, *rest = _chunk_gradients(computed, wide, tuple(given))
        dx[part] = of_x if dstreams is None else of_x.add_(dstreams[part])
        for total, gradient in zip(totals, rest, strict=True):
            total += gradient
    totals[-1] = totals[-1].to(weight.dtype)
    return dx, *totals, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        normed, post, comb = _read_forward(ctx, x, *rest)
        return normed, x, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed, dstreams, dpost, dcomb):
        return _read_backward(ctx, dnormed, dstreams, dpost, dcomb)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return _read_forward(ctx, *args)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed):
        return _read_backward(ctx, dnormed, None, None, None)


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, x, post, comb, workspace_bytes):
        ctx.save_for_backward(output, x, post, comb)
        ctx.workspace_bytes = workspace_bytes
        out, dtype = torch.empty_like(x), post.dtype
        for part in _chunks(x, workspace_bytes):
            wide = output[part].to(dtype), x[part].to(dtype)
            out[part] = _written(*wide, post[part], comb[part]).to(x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in tensors]
        dtype = tensors[2].dtype
        for part in _chunks(tensors[1], ctx.workspace_bytes):
            wide = [tensor[part].to(dtype) for tensor in tensors]
            given = (dout[part].to(dtype),)
            for total, gradient in zip(
                gradients, _chunk_gradients(_written, wide, given), strict=True
            ):
                total[part] = gradient
        return *gradients, None
