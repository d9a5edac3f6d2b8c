"""Operations of KDA layers on ``[batch, tokens, ...]``.

``cu_seqlens``: int ``[documents + 1]``, cumulative lengths of packed documents, which may be empty;
the batch must be one. States and convolutions restart at each document.
"""

import torch

from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.kda.spec import (
    ATTENTION,
    CONVOLUTION,
    NORM,
    ConvolutionInputs,
    KDAInputs,
    NormInputs,
)

__all__ = ["delta_attention", "gated_norm", "short_convolution"]


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Return the SiLU of a causal depthwise convolution.

    Args:
        x: ``[batch, tokens, channels]``.
        weight: ``[channels, 1, kernel]`` fp32 (fp64 for fp64 x); the last tap multiplies the
            current token.

    Returns:
        ``[batch, tokens, channels]`` in the dtype of x, computed in the weight's dtype;
        differentiable in x and weight.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    inputs = ConvolutionInputs(x, weight, cu_seqlens, policy.workspace_bytes)
    inputs.check()
    call = _describe(x, 1, x.shape[2], cu_seqlens)
    return CONVOLUTION.run(call, policy, inputs)


def delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    lower_bound: float,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Return the outputs of the gated delta rule (Kimi Linear, arXiv 2510.26692).

    Per head, with a state ``S [D, D]`` in fp32, after queries and keys are normalised to length 1
    (eps 1e-6) and queries scaled by ``D^-0.5``::

        S = diag(exp(d_t)) S_{t-1},  d_t = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias))
        S_t = S + sigmoid(beta_t) k_t (v_t - S^T k_t)^T,  o_t = S_t^T q_t

    Args:
        q, k, v, g: ``[batch, tokens, H, D]`` of one dtype, before normalisation and ``dt_bias``.
        beta: ``[batch, tokens, H]`` in the same dtype, before the sigmoid.
        A_log, dt_bias: ``[H]`` and ``[H * D]`` fp32 (fp64 for fp64 q).
        lower_bound: lowest log decay of a step, in [-5, 0).

    Returns:
        ``[batch, tokens, H, D]`` in the dtype of v; differentiable in all seven tensors.

    Raises:
        ConfigError: shapes, dtypes or ``lower_bound`` do not fit.
    """
    inputs = KDAInputs(
        q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, policy.workspace_bytes
    )
    inputs.check()
    return ATTENTION.run(_describe(q, q.shape[2], q.shape[3], cu_seqlens), policy, inputs)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Return ``RMSNorm(x) * weight * sigmoid(gate)`` per head, computed in fp32.

    Args:
        x, gate: ``[batch, tokens, H, D]`` of one dtype.
        weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        ``[batch, tokens, H, D]`` in the dtype of x; differentiable in all three tensors.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    inputs = NormInputs(x, gate, weight, eps, policy.workspace_bytes)
    inputs.check()
    return NORM.run(_describe(x, x.shape[2], x.shape[3], None), policy, inputs)


def _describe(x: torch.Tensor, heads: int, dim: int, cu_seqlens: torch.Tensor | None):
    packed = cu_seqlens is not None
    return describe_call(x.device, dtype=x.dtype, heads=heads, qk_dim=dim, v_dim=dim, packed=packed)
