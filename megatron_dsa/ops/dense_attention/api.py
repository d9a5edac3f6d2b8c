"""Dense attention on one rank."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Policy, device_problem
from megatron_dsa.dispatch.support import Problem
from megatron_dsa.numerics.checks import FLOATS, require_layout, require_tensor
from megatron_dsa.ops.dense_attention.declaration import DENSE_ATTENTION
from megatron_dsa.ops.dense_attention.inputs import DenseProblem
from megatron_dsa.sequence.layout import Layout


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    softmax_scale: float,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Causal attention over all visible keys, for the ``dense`` and ``warmup`` stages.

    Args:
        q: ``[Sq, H, D]``, k: ``[Skv, H, D]``, v: ``[Skv, H, Dv]``; ``Dv`` may differ from ``D``.
        layout: which keys each query row sees.
        softmax_scale: factor on ``q . k``.
        policy: which implementations may run.

    Returns:
        ``[Sq, H, Dv]`` in q's dtype; 0 for rows that see nothing.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or a layout of other tensors.
    """
    check_operands(q, k, v)
    require_layout(layout, {"q": q}, {"k": k})
    arguments = DenseProblem(q, k, v, layout, softmax_scale, policy.workspace_bytes)
    return DENSE_ATTENTION.run(dense_problem(q, v, layout), policy, arguments)


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise a :class:`ConfigError` unless shapes, dtypes and devices fit each other."""
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    fix = "repeat the heads of grouped queries' keys"
    require_tensor("k", k, ("Skv", *q.shape[1:]), (q.dtype,), q, fix)
    require_tensor("v", v, (*k.shape[:2], "Dv"), (q.dtype,), q, fix)


def dense_problem(q: torch.Tensor, v: torch.Tensor, layout: Layout) -> Problem:
    """Describe a call to dispatch."""
    return device_problem(
        q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        qk_dim=q.shape[2],
        v_dim=v.shape[2],
        packed=layout.real is not None,
    )
