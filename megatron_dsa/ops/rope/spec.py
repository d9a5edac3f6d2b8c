"""Norm and rope: operations, implementations, fake kernels, references."""

from typing import Any

import torch

from megatron_dsa.ops.common.capture import tensor_cache
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF
from megatron_dsa.ops.meta import differentiable, empty_sums

_HERE = __package__


def _operation(name: str, title: str, function: str, covers: str, **support: Any) -> Operation:
    fused = Support(covers, TRITON, dtypes=(*HALF, torch.float32), **PORTABLE, **support)
    return Operation(
        name,
        title,
        (
            Candidate("triton", f"{_HERE}.triton:{function}", fused),
            Candidate("torch", f"{_HERE}.torch:{function}", Support("any shape"), fused=False),
        ),
        fake=f"{_HERE}.spec:fake_{function}",
    )


NORM_ROPE = _operation(
    "norm_rope", "norm and rope of queries, forward and backward", "norm_rope", "in place; q"
)
ROTATE = _operation(
    "rotate", "rope, or inverse rope, forward and backward", "rotate", "any rotated dims"
)
INDEX_ROTATION = _operation(
    "index_rotation",
    "rope and Hadamard transform of index queries and keys, forward and backward",
    "rotate_index",
    "first or last dims, either pairing",
    dims=tuple((dim, 0) for dim in (16, 32, 64, 128)),
)


def fake_norm_rope(
    candidate: Candidate, x, cos, sin, _eps, inplace, workspace_bytes: int
) -> torch.Tensor:
    def forward(x):
        y = x.detach() if inplace and candidate.fused else torch.empty_like(x)
        rstd = empty_sums(x, *x.shape[:2])
        return (y, rstd), (y, rstd, cos, sin)

    def backward(y, *_):
        return (torch.empty_like(y),)

    workspace_bytes = 0 if candidate.fused else workspace_bytes
    return differentiable((x.contiguous(),), forward, backward, workspace_bytes)


def fake_rotate(candidate: Candidate, x, cos, sin, _inverse, workspace_bytes: int) -> torch.Tensor:
    shape, dtype = x.shape, x.dtype

    def forward(x):
        return (torch.empty_like(x),), (cos, sin)

    def backward(cos, _sin):
        return (cos.new_empty(shape, dtype=dtype),)

    workspace_bytes = 0 if candidate.fused else workspace_bytes
    return differentiable((x.contiguous(),), forward, backward, workspace_bytes)


def fake_rotate_index(
    candidate: Candidate, x, cos, sin, _first, _neighbours, _transform, workspace_bytes: int,
    transposed: bool = False,
) -> torch.Tensor:  # fmt: skip
    x = x.detach() if transposed else x
    return fake_rotate(candidate, x, cos, sin, False, workspace_bytes)


def reference_rotate(x, cos, sin, inverse) -> torch.Tensor:
    return reference_rotate_index(x, cos, -sin if inverse else sin, False, True, False)


def reference_norm_rope(x, cos, sin, eps) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return reference_rotate(normed, cos, sin, False)


def reference_rotate_index(x, cos, sin, first, neighbours, transform) -> torch.Tensor:
    """Rotate pairs of the first or last dims of ``x [tokens, H, D]``, then transform all dims.

    Pairs of first dims move to the two halves, pairs of last dims do not move. Entry ``i, j`` of
    the transform is ``D^-1/2``, negative if ``i & j`` has an odd number of bits.
    """
    dim, half = x.shape[-1], cos.shape[1]
    start = 0 if first else dim - 2 * half
    result = list(x.unbind(-1))
    for i in range(half):
        j, k = (2 * i, 2 * i + 1) if neighbours else (i, half + i)
        c, s = cos[:, i : i + 1], sin[:, i : i + 1]
        a, b = x[..., start + j], x[..., start + k]
        if first:
            j, k = i, half + i
        result[start + j], result[start + k] = a * c - b * s, a * s + b * c
    if not transform:
        return torch.stack(result, -1)
    signs = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    return torch.stack(result, -1) @ x.new_tensor(signs) * dim**-0.5


@tensor_cache(8)
def hadamard_signs(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the Walsh-Hadamard matrix, whose square is ``size`` times the identity."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix
