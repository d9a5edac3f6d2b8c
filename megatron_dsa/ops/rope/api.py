"""Rope with or without the norm of queries, and rope backwards (DeepSeek-V4)."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Policy, describe_call
from megatron_dsa.ops.rope.declaration import NORM_ROPE, ROTATE
from megatron_dsa.ops.rope.inputs import check_inputs

__all__ = ["norm_rope", "rotate"]


def norm_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    *,
    inplace: bool = False,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Divide each head by its root mean square and rotate its last dims.

    Args:
        x: ``[rows, H, D]``.
        cos, sin: ``[rows, R / 2]`` fp32 (fp64 for fp64 x); the last ``R`` dims are rotated in
            neighbouring pairs, which stay in place.
        eps: added to the mean square.
        inplace: the result may take the memory of x, which nobody else reads.
        policy: which implementations may run.

    Returns:
        ``[rows, H, D]`` in x's dtype, differentiable in x.
    """
    check_inputs(x, cos, sin)
    call = _describe(x)
    return NORM_ROPE.run(call, policy, x, cos, sin, eps, inplace, policy.workspace_bytes)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Rotate the last dims of every head, or rotate them back.

    Arguments and result as in :func:`norm_rope`, without the norm.
    """
    check_inputs(x, cos, sin)
    call = _describe(x)
    return ROTATE.run(call, policy, x, cos, sin, inverse, policy.workspace_bytes)


def _describe(x: torch.Tensor):
    return describe_call(x.device, dtype=x.dtype, heads=x.shape[1], qk_dim=x.shape[2], v_dim=0)
