"""Query norm and rope, stated as plainly as possible. Differentiable by autograd."""

import torch


def rotate(x, cos, sin, inverse) -> torch.Tensor:
    """Return ``x [rows, H, D]`` with pairs of its last dims rotated by ``cos, sin [rows, R / 2]``.

    ``inverse`` rotates the other way.
    """
    result = list(x.unbind(-1))
    start = x.shape[-1] - 2 * cos.shape[1]
    for i in range(cos.shape[1]):
        c, s = cos[:, i : i + 1], sin[:, i : i + 1]
        if inverse:
            s = -s
        a, b = x[..., start + 2 * i], x[..., start + 2 * i + 1]
        result[start + 2 * i] = a * c - b * s
        result[start + 2 * i + 1] = a * s + b * c
    return torch.stack(result, -1)


def norm_rope(x, cos, sin, eps) -> torch.Tensor:
    """Return ``rotate(x * rsqrt(mean(x^2) + eps))``; ``x [rows, H, D]``."""
    return rotate(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), cos, sin, False)
