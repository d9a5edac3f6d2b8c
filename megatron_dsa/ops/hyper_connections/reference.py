"""Hyper-connections, stated as plainly as possible: a token at a time, numbers of ``[n, n]``.

Differentiable by autograd. Rounding to the dtype of the streams passes gradients unchanged.
"""

import torch


def read(inputs) -> tuple[torch.Tensor, ...]:
    """Return ``normed [T, C]``, the streams, ``post [T, n]`` and ``comb [T, n, n]``."""
    n = inputs.streams.shape[1]
    normed, posts, combs = [], [], []
    for x in inputs.streams.unbind():
        m, base, scale = _projected(x, inputs), inputs.connection.base, inputs.connection.scale
        pre = torch.sigmoid(m[:n] * scale[0] + base[:n]) + inputs.connection.eps
        posts.append(2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n]))
        logits = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
        combs.append(sinkhorn(logits, inputs.connection.iterations, inputs.connection.eps))
        normed.append(_mixed(x, pre, inputs))
    return torch.stack(normed), inputs.streams, torch.stack(posts), torch.stack(combs)


def write(inputs) -> torch.Tensor:
    """Return ``[T, n, C]``."""
    out = []
    for y, x, post, comb in zip(*inputs.tensors, strict=True):
        y, x = y.to(post.dtype), x.to(post.dtype)
        n = len(post)
        new = [post[j] * y + sum(comb[i, j] * x[i] for i in range(n)) for j in range(n)]
        out.append(torch.stack(new).to(inputs.streams.dtype))
    return torch.stack(out)


def head(inputs) -> torch.Tensor:
    """Return ``[T, C]``."""
    c = inputs.connection
    normed = []
    for x in inputs.streams.unbind():
        pre = torch.sigmoid(_projected(x, inputs) * c.scale[0] + c.base) + c.eps
        normed.append(_mixed(x, pre, inputs))
    return torch.stack(normed)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Return ``[n, n]``: rows of a softmax, then columns and rows divided by their sums in turn."""
    comb = torch.softmax(logits, 1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


def _projected(x, inputs) -> torch.Tensor:
    """Return one number per row of ``fn`` for ``x [n, C]``, all streams under one norm."""
    fn = inputs.connection.fn
    flat = x.flatten().to(fn.dtype)
    return fn @ flat * torch.rsqrt(flat.square().mean() + inputs.connection.norm_eps)


def _mixed(x, pre, inputs) -> torch.Tensor:
    """Return ``RMSNorm(sum_i pre_i x_i) [C]``."""
    u = sum(weight * stream for weight, stream in zip(pre, x.to(pre.dtype), strict=True))
    u = u + (u.to(x.dtype).to(u.dtype) - u).detach()
    u = u * torch.rsqrt(u.square().mean() + inputs.connection.norm_eps)
    return (u * inputs.weight.to(u.dtype)).to(x.dtype)
