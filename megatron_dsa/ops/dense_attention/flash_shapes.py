"""Conversion of shapes for flash-attention kernels, and padding of values.

Kernels take ``[batch, s, H, D]``, or packed ``[tokens, H, D]``; their lse has heads before tokens.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import OpCall, Reason

LARGEST = 256


class Lengths(NamedTuple):
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    max_q: int
    max_k: int


def common_reason(call: OpCall, pads_values: bool = False) -> Reason | None:
    if call.device != "cuda":
        return Reason("needs a CUDA GPU", f", this is {call.on()}")
    assert call.capability is not None
    if call.capability < (8, 0):
        return Reason("needs compute capability 8.0 or later", f", this is {call.on()}")
    dims = call.qk_dim, call.v_dim
    if any(dim % 8 for dim in dims) or max(dims) > LARGEST:
        return Reason(f"needs head dims that are multiples of 8 up to {LARGEST}", f", got {dims}")
    if pads_values and call.v_dim > call.qk_dim:
        got = f", got {call.v_dim} and {call.qk_dim}"
        return Reason("needs values no wider than keys", got)
    return None


def with_kernel_shapes(module: ModuleType, pads_values: bool = True):
    """Return forward and backward of :class:`.spec.BlockAttention` for a module's kernels.

    ``pads_values``: pad values to the width of keys, for kernels with one head dim.
    """

    def forward(q, k, v, causal, scale, sequences):
        width = v.shape[-1]
        v = _padded(v, q.shape[-1]) if pads_values else v
        q, k, v = (_to_kernel(x, sequences) for x in (q, k, v))
        out, lse = module.forward(q, k, v, _lengths(q, k, sequences), causal, scale)
        return _from_kernel(out[..., :width], sequences), lse_from_kernel(lse, sequences)

    def backward(dout, q, k, v, out, lse, causal, scale, sequences):
        width = v.shape[-1]
        if pads_values:
            dout, v, out = (_padded(x, q.shape[-1]) for x in (dout, v, out))
        dout, q, k, v, out = (_to_kernel(x, sequences) for x in (dout, q, k, v, out))
        lse, lengths = lse_to_kernel(lse, sequences), _lengths(q, k, sequences)
        dq, dk, dv = module.backward(dout, q, k, v, out, lse, lengths, causal, scale)
        return tuple(_from_kernel(x, sequences) for x in (dq, dk, dv[..., :width]))

    return forward, backward


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _to_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    if isinstance(sequences, Packed):
        return x
    return x.unflatten(0, (-1, sequences.batch)).transpose(0, 1)


def _from_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    return x if isinstance(sequences, Packed) else x.transpose(0, 1).flatten(0, 1)


def lse_from_kernel(lse: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    if isinstance(sequences, Packed):
        # For queries without keys, some kernels return +inf.
        lse = lse.transpose(0, 1)
        return lse.masked_fill(sequences.blind(lse.shape[0]), float("-inf"))
    return lse.permute(2, 0, 1).flatten(0, 1)


def lse_to_kernel(lse: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    if isinstance(sequences, Packed):
        return lse.transpose(0, 1).contiguous()
    return lse.unflatten(0, (-1, sequences.batch)).permute(1, 2, 0).contiguous()


def _lengths(q: torch.Tensor, k: torch.Tensor, sequences: Dense | Packed) -> Lengths:
    if isinstance(sequences, Packed):
        return Lengths(sequences.cu_q, sequences.cu_k, sequences.longest, sequences.longest)
    return Lengths(None, None, q.shape[1], k.shape[1])
