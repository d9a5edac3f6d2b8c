"""Interleaved rope on the last dims of heads, with or without V4's query norm.

Dims ``D - R + 2i`` and ``D - R + 2i + 1`` are rotated by the angle of ``cos[token, i]`` and
``sin[token, i]``. Kernels are memory-bound: they read, write and round every element once.
"""

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.rope.spec import INDEX_ROTATION, NORM_ROPE, ROTATE

__all__ = ["norm_rope", "rotate", "rotate_index"]


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
        x: ``[tokens, H, D]``.
        cos, sin: ``[tokens, R / 2]`` fp32 (fp64), for neighbouring pairs of the last ``R`` dims.
        eps: added to the mean square.
        inplace: allow overwriting x, which nothing else may read.

    Returns:
        ``[tokens, H, D]`` in x's dtype, differentiable in x.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    _check(x, cos, sin)
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
    """Rotate the last dims of every head forward or back.

    V4's outputs are rotated back because its values have rope. Arguments, result and errors are as
    in :func:`norm_rope`; without columns in the tables the result may be ``x``.
    """
    _check(x, cos, sin)
    if cos.shape[1] == 0:  # a copy of 8k x 64 x 256 would cost 0.13 ms
        # An empty rope key is a view of the latents' storage, which recomputation may free.
        return x if x.shape[2] > 0 else x.clone()
    call = _describe(x)
    return ROTATE.run(call, policy, x, cos, sin, inverse, policy.workspace_bytes)


def rotate_index(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    first: bool = True,
    neighbours: bool = True,
    transform: bool = True,
    rounded: bool = False,
    transposed: bool = False,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Rotate some dims of index queries or keys, then apply the Walsh-Hadamard transform.

    The orthogonal transform changes no product, but spreads large values over all dims.

    Args:
        x: ``[tokens, H, D]``.
        cos, sin: ``[tokens, R / 2]`` fp32 (fp64).
        first: rotate the first ``R`` dims and move pair ``i`` to dims ``i`` and ``R / 2 + i``, as
            Megatron's MLA does; otherwise rotate the last ``R`` dims without moving them.
        neighbours: pairs are neighbouring dims, otherwise dims ``i`` and ``R / 2 + i``.
        transform: apply the normalised transform to all ``D`` dims, a power of two.
        rounded: also round to x's dtype before the transform, as inference engines do.
        transposed: apply the transposed operation, which maps gradients back.

    Returns:
        ``[tokens, H, D]`` in x's dtype, differentiable in x unless ``transposed``.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    _check(x, cos, sin)
    dim = x.shape[2]
    require(
        not transform or dim & (dim - 1) == 0,
        f"x must have a power of two as its dim for the transform, got {dim}: pass transform=False",
    )
    if cos.shape[1] == 0 and not transform:
        return x
    steps = [(cos, sin, transform)]
    if rounded and transform and cos.shape[1]:
        steps = [(cos, sin, False), (cos[:, :0], sin[:, :0], True)]
    for cos, sin, transform in reversed(steps) if transposed else steps:
        x = INDEX_ROTATION.run(
            _describe(x), policy, x, cos, sin, first, neighbours, transform,
            policy.workspace_bytes, transposed,
        )  # fmt: skip
    return x


def _describe(x: torch.Tensor):
    return describe_call(x.device, dtype=x.dtype, heads=x.shape[1], qk_dim=x.shape[2], v_dim=0)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    require_tensor("x", x, ("tokens", "H", "D"), FLOATS, fix="flatten sequence and batch to tokens")
    if x.shape[2] % 2:
        raise ConfigError(f"x must have an even dim, got {x.shape[2]}: pad the heads.")
    fix, dtypes = "gather the rope tables by position", (accumulation_dtype(x.dtype),)
    require_tensor("cos", cos, (x.shape[0], "R / 2"), dtypes, x, fix)
    require_tensor("sin", sin, tuple(cos.shape), dtypes, x, fix)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ConfigError(
            f"cos and sin must have at most dim / 2 = {x.shape[2] // 2} columns, got "
            f"{cos.shape[1]}: one column rotates two dims."
        )
