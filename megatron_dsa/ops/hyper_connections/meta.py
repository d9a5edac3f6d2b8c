"""Hyper-connections on the meta device."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Candidate
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.ops.hyper_connections.inputs import ReadInputs, WriteInputs
from megatron_dsa.ops.meta import differentiable, empty_sums, take_workspace

#: Partial gradients of ``fn`` and of the norm's weight in the Triton backward.
_FN_PARTS, _WEIGHT_PARTS = 4, 264


def read(candidate: Candidate, inputs: ReadInputs) -> tuple[torch.Tensor, ...]:
    """Meta function of ``hyper_connection_read``; ``READ.run`` calls it in a plan."""
    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    return _Read.apply(candidate.fused, workspace_bytes, *inputs.tensors)


def head(candidate: Candidate, inputs: ReadInputs) -> torch.Tensor:
    """Meta function of ``hyper_connection_head``; ``HEAD.run`` calls it in a plan."""

    def forward(x, *parameters):
        kept = _numbers(x, parameters[0])[:4] if candidate.fused else ()
        return (x.new_empty(x.shape[0], x.shape[2]),), (x, *parameters, *kept)

    def backward(x, *kept):
        return _gradients(candidate.fused, x, kept[:4])

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    return differentiable(inputs.tensors, forward, backward, workspace_bytes)


def write(candidate: Candidate, inputs: WriteInputs) -> torch.Tensor:
    """Meta function of ``hyper_connection_write``; ``WRITE.run`` calls it in a plan."""

    def forward(*tensors):
        return (torch.empty_like(tensors[1]),), tensors

    def backward(*kept):
        return tuple(map(torch.empty_like, kept))

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    return differentiable(inputs.tensors, forward, backward, workspace_bytes)


def _numbers(x, fn):
    """Return the projection, the factors of both norms, ``pre``, ``post`` and ``comb``."""
    tokens, n, _ = x.shape
    shapes = ((fn.shape[0],), (), (), (n,), (n,), (n, n))
    return tuple(empty_sums(x, tokens, *shape) for shape in shapes)


def _gradients(fused: bool, x, parameters):
    """Return the gradients of a read; the Triton kernels have temporaries of their own."""
    temporaries = []
    if fused:
        fn, weight = parameters[0], parameters[3]
        temporaries = [
            x.new_empty(x.shape[0], x.shape[2]), fn.new_empty(_FN_PARTS, *fn.shape),
            fn.new_empty(_WEIGHT_PARTS, *weight.shape),
        ]  # fmt: skip
    gradients = tuple(map(torch.empty_like, (x, *parameters)))
    del temporaries
    return gradients


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fused, workspace_bytes, x, *parameters):
        *kept, post, comb = _numbers(x, parameters[0])
        ctx.save_for_backward(x, *parameters, *(kept if fused else ()))
        ctx.rest = fused, workspace_bytes
        take_workspace(x, workspace_bytes)
        return x.new_empty(x.shape[0], x.shape[2]), x, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed, *_rest):
        fused, workspace_bytes = ctx.rest
        take_workspace(dnormed, workspace_bytes)
        x, *kept = ctx.saved_tensors
        return None, None, *_gradients(fused, x, kept[:4])
