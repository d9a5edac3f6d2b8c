"""Dense attention through torch's own fused kernels (unpacked batches on a GPU)."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_dsa.dispatch.support import Problem
from megatron_dsa.ops.dense_attention.inputs import DenseProblem

_FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


def probe(problem: Problem) -> str | None:
    """Return why torch's scaled_dot_product_attention cannot run this, or ``None``."""
    if problem.device != "cuda":
        return f"torch's fused attention needs a CUDA GPU, this is {problem.on()}"
    if problem.qk_dim % 8 or problem.v_dim % 8 or problem.qk_dim > 256 or problem.v_dim > 256:
        return (
            "needs head dims that are multiples of 8 up to 256, got "
            f"{problem.qk_dim} and {problem.v_dim}"
        )
    return None


def forward(problem: DenseProblem) -> torch.Tensor:
    """Return ``out [Sq, H, Dv]``; every window of the layout is one causal sequence."""
    sequences = [window.rows for window in problem.layout.windows]
    q, k, v = (
        torch.stack([x[rows] for rows in sequences]).transpose(1, 2)
        for x in (problem.q, problem.k, problem.v)
    )
    # torch picks among kernels that take a value narrower than the key; no padding needed. Its
    # plain one is left out: it would build S x S scores under the name of a fused kernel.
    with sdpa_kernel(_FUSED):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=problem.softmax_scale
        )
    # [b, h, s, d] -> rows s * b + b, the layout's order for unpacked batches.
    return out.permute(2, 0, 1, 3).reshape(problem.q.shape[0], problem.q.shape[1], -1)
