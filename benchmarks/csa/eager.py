"""The pieces as plain torch expressions, in any floating-point dtype."""

import torch
from torch.nn.functional import pad

from megatron_dsa.ops.common.arithmetic import accumulation_dtype


def compress(values, scores, ape, ratio: int, overlap: bool):
    """Pool groups of ``ratio`` tokens; every token is in a group."""
    values = values.unflatten(0, (-1, ratio))
    scores = scores.unflatten(0, (-1, ratio)) + ape
    if overlap:
        values, scores = _with_previous(values, 0.0), _with_previous(scores, float("-inf"))
    return (scores.softmax(1) * values).sum(1).to(values.dtype)


def _with_previous(x, missing: float):
    """Return ``[groups, 2 * ratio, d]``: first channels of the previous group, last channels of
    this one.
    """
    dim = x.shape[2] // 2
    previous = pad(x[:-1, :, :dim], (0, 0, 0, 0, 1, 0), value=missing)
    return torch.cat([previous, x[:, :, dim:]], 1)


def rotate(x, cos, sin, inverse: bool = False):
    """Rotate pairs of the last dims of every head."""
    rope = 2 * cos.shape[1]
    head, tail = x.split([x.shape[-1] - rope, rope], -1)
    a, b = tail.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, tail.to(x.dtype)], -1)


def norm_rope(x, cos, sin, eps: float):
    """Divide every head by its root mean square, then rotate."""
    wide = x.to(accumulation_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return rotate(wide, cos, sin).to(x.dtype)


def key_lists(position, window: int, offset: int, selected=None, ratio: int = 0, slots=0):
    """List compressed keys, selected or all visible ones, and the window of tokens at ``position``.

    Keys of tokens start at ``offset`` in the key buffer.

    Returns:
        ``lists`` int32 ``[tokens, width]`` (valid entries first) and ``length`` int32 ``[tokens]``.
    """
    position = position[:, None]
    keys = position + torch.arange(1 - window, 1, device=position.device)
    keys = torch.where(keys < 0, -1, keys + offset)
    if selected is not None:
        compressed = selected
    else:
        slot = torch.arange(slots, device=position.device)
        visible = slot < ((position + 1) // ratio if ratio else 0 * position)
        compressed = torch.where(visible, slot, -1)
    lists = torch.cat([compressed, keys], 1)
    order = torch.argsort((lists < 0).to(torch.int8), dim=1, stable=True)
    return lists.gather(1, order).int(), (lists >= 0).sum(1, dtype=torch.int32)
