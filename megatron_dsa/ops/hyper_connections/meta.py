"""Hyper-connections on the meta device."""

import torch

from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.hyper_connections.inputs import ReadInputs, WriteInputs
from megatron_dsa.ops.hyper_connections.triton.tiles import read_backward_tiles, weight_parts
from megatron_dsa.ops.meta import differentiable, empty_sums, take_workspace

#: Multiprocessors of a Hopper GPU, over which the partial sums of the kernels are spread.
_PROCESSORS = 132


def read(candidate: Candidate, inputs: ReadInputs) -> tuple[torch.Tensor, ...]:
    """Meta function of ``hyper_connection_read``; ``READ.run`` calls it in a plan."""
    return _Read.apply(candidate.fused, inputs.workspace_bytes, *inputs.tensors)


def head(candidate: Candidate, inputs: ReadInputs) -> torch.Tensor:
    """Meta function of ``hyper_connection_head``; ``HEAD.run`` calls it in a plan."""
    fused, size = candidate.fused, inputs.workspace_bytes

    def forward(x, *parameters):
        kept = _numbers(x, parameters[0])[:4] if fused else ()
        normed = x.new_empty(x.shape[0], x.shape[2])
        _take(fused, x, size)
        return (normed,), (x, *parameters, *kept)

    def backward(x, *kept):
        return _gradients(fused, size, x, kept[:4])

    return differentiable(inputs.tensors, forward, backward)


def write(candidate: Candidate, inputs: WriteInputs) -> torch.Tensor:
    """Meta function of ``hyper_connection_write``; ``WRITE.run`` calls it in a plan."""
    fused, size = candidate.fused, inputs.workspace_bytes

    def forward(*tensors):
        out = torch.empty_like(tensors[1])
        _take(fused, out, size)
        return (out,), tensors

    def backward(*kept):
        gradients = tuple(map(torch.empty_like, kept))
        _take(fused, kept[0], size)
        return gradients

    return differentiable(inputs.tensors, forward, backward)


def _take(fused: bool, like: torch.Tensor, size: int) -> None:
    """Take the temporaries of torch, beside all results."""
    if not fused:
        take_workspace(like, size)


def _numbers(x, fn):
    """Return the projection, the factors of both norms, ``pre``, ``post`` and ``comb``."""
    tokens, n, _ = x.shape
    shapes = ((fn.shape[0],), (), (), (n,), (n,), (n, n))
    return tuple(empty_sums(x, tokens, *shape) for shape in shapes)


def _gradients(fused: bool, workspace_bytes: int, x, parameters):
    """Return the gradients of a read; the Triton kernels have temporaries of their own."""
    temporaries = []
    if fused:
        (tokens, n, channels), fn = x.shape, parameters[0]
        _, parts, _ = read_backward_tiles(tokens, channels, n, fn.shape[0], _PROCESSORS)
        temporaries = [
            fn.new_empty(weight_parts(tokens, _PROCESSORS), channels),
            x.new_empty(tokens, channels), fn.new_empty(parts, *fn.shape),
            fn.new_empty(tokens, fn.shape[0] + n + 1),
        ]  # fmt: skip
    gradients = tuple(map(torch.empty_like, (x, *parameters)))
    _take(fused, x, workspace_bytes)
    del temporaries
    return gradients


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fused, workspace_bytes, x, *parameters):
        *kept, post, comb = _numbers(x, parameters[0])
        ctx.save_for_backward(x, *parameters, *(kept if fused else ()))
        ctx.rest = fused, workspace_bytes
        normed = x.new_empty(x.shape[0], x.shape[2])
        _take(fused, x, workspace_bytes)
        return normed, x, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, *_gradients_of_results):
        (x, *kept), (fused, workspace_bytes) = ctx.saved_tensors, ctx.rest
        return None, None, *_gradients(fused, workspace_bytes, x, kept[:4])
