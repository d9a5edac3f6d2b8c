"""Norm and rope on the meta device."""

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.meta import differentiable, empty_sums


def norm_rope(
    candidate: Candidate, x, cos, sin, _eps, inplace, workspace_bytes: int
) -> torch.Tensor:
    """Meta function of ``norm_rope``; ``NORM_ROPE.run`` calls it in a plan."""

    def forward(x):
        # torch's result has memory of its own.
        y = x.detach() if inplace and candidate.fused else torch.empty_like(x)
        rstd = empty_sums(x, *x.shape[:2])
        return (y, rstd), (y, rstd, cos, sin)

    def backward(y, *_):
        return (torch.empty_like(y),)

    workspace_bytes = 0 if candidate.fused else workspace_bytes
    return differentiable((x.contiguous(),), forward, backward, workspace_bytes)


def rotate(candidate: Candidate, x, cos, sin, _inverse, workspace_bytes: int) -> torch.Tensor:
    """Meta function of ``rotate``; ``ROTATE.run`` calls it in a plan."""
    shape, dtype = x.shape, x.dtype

    def forward(x):
        return (torch.empty_like(x),), (cos, sin)

    def backward(cos, _sin):
        return (cos.new_empty(shape, dtype=dtype),)

    workspace_bytes = 0 if candidate.fused else workspace_bytes
    return differentiable((x.contiguous(),), forward, backward, workspace_bytes)


def rotate_index(
    candidate: Candidate, x, cos, sin, _first, _neighbours, _transform, workspace_bytes: int,
    transposed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Meta function of ``index_rotation``; ``INDEX_ROTATION.run`` calls it in a plan."""
    if transposed:
        x = x.detach()
    return rotate(candidate, x, cos, sin, False, workspace_bytes)
