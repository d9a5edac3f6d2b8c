"""Dense attention, stated as plainly as possible. Differentiable; materialises everything."""

import torch


def dense_attention(q, k, v, visible, softmax_scale) -> torch.Tensor:
    """Return ``out [Sq, H, Dv]`` for ``visible`` bool ``[Sq, Skv]``; empty rows give 0."""
    logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    logits = logits.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(dim=-1)
    p = torch.softmax(logits.masked_fill(empty[:, None], 0.0), dim=-1)
    return torch.einsum("hqk,khd->qhd", p.masked_fill(empty[:, None], 0.0), v)
