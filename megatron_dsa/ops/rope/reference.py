"""Query norm, rope, rotation of index heads, as plainly as possible. Differentiable by autograd."""

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


def rotate_index(x, cos, sin, first, neighbours, transform) -> torch.Tensor:
    """Return ``x [tokens, H, D]`` with pairs of its first or last dims rotated, transformed.

    Pairs of the first dims leave as halves, others stay in place.

    Entry ``i, j`` of the transform is ``D^-1/2``, negative if ``i & j`` has an odd number of bits.
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
