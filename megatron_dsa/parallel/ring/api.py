"""Dense attention over context-parallel ranks, as operations on plain tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_dsa.dispatch import Policy
from megatron_dsa.numerics.checks import FLOATS, require_layout, require_tensor
from megatron_dsa.ops.dense_attention.api import check_operands, dense_problem
from megatron_dsa.ops.dense_attention.declaration import RING_ATTENTION
from megatron_dsa.parallel.ring import attention
from megatron_dsa.parallel.ring.layouts import ring_rows
from megatron_dsa.sequence.layout import Layout


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    group,
    *,
    softmax_scale: float,
    policy: Policy = Policy(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`~megatron_dsa.ops.dense_attention.api.dense_attention` over context-parallel ranks:
    keys and values go round a ring.

    Args:
        q, k, v: of this rank's rows, see there.
        layout: of this rank's rows, spread over ``group``.
        group: the context-parallel process group.
        softmax_scale, policy: see there.

    Returns:
        ``out [rows, H, Dv]`` in q's dtype, 0 for rows that see nothing, and ``lse [rows, H]`` fp32
        (fp64 for fp64), natural log, ``-inf`` for such rows, without gradient.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or a layout of other tensors.
    """
    check_operands(q, k, v)
    require_layout(layout, {"q": q, "k": k}, {})
    arguments = (q, k, v, ring_rows(layout), group, softmax_scale)
    problem, budget = dense_problem(q, v, layout), policy.workspace_bytes
    return RING_ATTENTION.run(problem, policy, attention.ring_attention, budget, *arguments)


def gathered_latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    layout: Layout,
    *,
    softmax_scale: float,
    latent_grad: torch.Tensor | None = None,
    policy: Policy = Policy(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`~megatron_dsa.ops.dense_attention.api.dense_attention` over context-parallel ranks
    whose MLA latents were gathered.

    Head ``h`` has keys ``[latents[:, :R] @ w_uk[h].T, latents[:, R:]]`` and values
    ``latents[:, :R] @ w_uv[h].T``. They exist of one rank's rows at a time; nothing is sent.

    Args:
        q: ``[rows, H, D]`` of this rank's rows, rotated.
        latents: ``[cp * rows, R + P]``, of all context-parallel ranks, one after the other:
            normalised, and the ``P`` rope dims rotated.
        w_uk: ``[H, D - P, R]``; w_uv: ``[H, Dv, R]``, of the local heads. Their gradients are of
            this rank's queries.
        layout: of this rank's rows, spread over context-parallel ranks.
        softmax_scale: factor on ``q . k``.
        latent_grad: fp32 ``[cp * rows, R + P]``: if given, the gradient of ``latents`` is sent
            here, unrounded, instead of to ``latents`` (see
            :func:`megatron_dsa.parallel.gather.arrive`).
        policy: which implementations may run, as of the operation ``ring_attention``.

    Returns:
        ``out`` and ``lse`` as of :func:`ring_attention`.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or a layout of other tensors.
    """
    require_tensor("q", q, ("rows", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    require_tensor("w_uv", w_uv, (q.shape[1], "Dv", "R"), (q.dtype,), q, "split it by heads")
    require_layout(layout, {"q": q}, {})
    problem = replace(dense_problem(q, q, layout), v_dim=w_uv.shape[1])
    return RING_ATTENTION.run(problem, policy, attention.gathered_latent_attention,
        policy.workspace_bytes, q, latents, w_uk, w_uv, ring_rows(layout), softmax_scale,
        latent_grad=latent_grad,
    )  # fmt: skip
