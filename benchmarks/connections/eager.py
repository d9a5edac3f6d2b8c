"""Hyper-connections as plain torch expressions with autograd.

They compute in the parameters' dtype; ``u``, the layer's input, is rounded to ``rounded`` before
its norm, like in the model.
"""

import torch


def _projection(flat, fn, norm_eps):
    return flat @ fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def _mix(x, pre, weight, norm_eps, rounded):
    u = (pre[:, :, None] * x).sum(1)
    u = u + (u.to(rounded).to(u.dtype) - u).detach()
    return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps) * weight


def read(x, fn, base, scale, weight, eps, norm_eps, iterations, rounded):
    """Return the layer's input, ``post`` and ``comb`` of streams ``x [tokens, n, C]``."""
    n, wide = x.shape[1], x.to(fn.dtype)
    m = _projection(wide.flatten(1), fn, norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return _mix(wide, pre, weight.to(fn.dtype), norm_eps, rounded).to(x.dtype), post, comb


def write(output, x, post, comb):
    wide, y = x.to(post.dtype), output.to(post.dtype)
    return (post[:, :, None] * y[:, None] + comb.transpose(1, 2) @ wide).to(x.dtype)


def head(x, fn, base, scale, weight, eps, norm_eps, _iterations, rounded):
    wide = x.to(fn.dtype)
    pre = torch.sigmoid(_projection(wide.flatten(1), fn, norm_eps) * scale + base) + eps
    return _mix(wide, pre, weight.to(fn.dtype), norm_eps, rounded).to(x.dtype)
