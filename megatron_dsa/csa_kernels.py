"""The public operations of hybrid attention besides sparse attention: pooling and rotations.

Like :mod:`megatron_dsa.dsa_kernels` they take plain tensors on flattened rows, pick an
implementation and are differentiable. Lists of keys are :mod:`megatron_dsa.ops.key_lists.api`.
"""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Policy, device_problem, run
from megatron_dsa.errors import require
from megatron_dsa.ops.compressor import CompressorProblem
from megatron_dsa.ops.rope import check_inputs
from megatron_dsa.sequence.compressed import CompressedKeys

__all__ = ["compress", "norm_rope", "rotate"]


def _problem(x: torch.Tensor, heads: int, dim: int):
    return device_problem(x.device, dtype=x.dtype, heads=heads, qk_dim=dim, v_dim=0)


def compress(
    values: torch.Tensor,
    scores: torch.Tensor,
    ape: torch.Tensor,
    keys: CompressedKeys,
    *,
    overlap: bool,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Pool every group of positions into one row (DeepSeek-V4's compressor, before its norm).

    Args:
        values, scores: ``[rows, c * d]`` of one dtype; ``c`` is 2 with overlap, else 1.
        ape: ``[ratio, c * d]`` fp32 (fp64 for fp64 values), added to the scores by position.
        keys: the groups, from :func:`megatron_dsa.sequence.compressed.compressed_keys`.
        overlap: a group also pools the positions of the group before it, with the first ``d``
            channels; its own use the last ``d``.
        policy: which implementations may run.

    Returns:
        ``[keys.count, d]`` in the dtype of values; 0 in slots without a group. Differentiable in
        values, scores and ape; equal inputs give bitwise equal gradients.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or keys of another batch.
    """
    require(
        values.shape[:1] == (keys.pooled_rows,),
        f"values must have the {keys.pooled_rows} tokens that keys describe, got shape "
        f"{tuple(values.shape)}: make keys for the batch of these tensors",
    )
    problem = CompressorProblem(
        values, scores, ape, keys.groups, keys.ratio, overlap, policy.workspace_bytes
    )
    return run("compressor", _problem(values, 1, problem.dim), policy, problem)


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
    problem = _problem(x, x.shape[1], x.shape[2])
    return run("norm_rope", problem, policy, x, cos, sin, eps, inplace, policy.workspace_bytes)


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
    problem = _problem(x, x.shape[1], x.shape[2])
    return run("rotate", problem, policy, x, cos, sin, inverse, policy.workspace_bytes)
