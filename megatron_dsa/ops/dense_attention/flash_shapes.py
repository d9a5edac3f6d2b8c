"""Shapes of flash-attention kernels, and padding of values.

Kernels take ``[batch, s, H, D]``, or packed ``[tokens, H, D]`` with ``cu_seqlens``, and return the
log-sum-exp heads first.
"""

import torch

from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch import OpCall, Reason
from megatron_dsa.ops.dispatch.support import HALF, short_dtype

#: Widest head.
LARGEST = 256


def common_reason(call: OpCall, pads_values: bool = False) -> Reason | None:
    """Return why no flash-attention kernel can run this, or ``None``.

    ``pads_values``: the kernels take one head dim, to which narrower values are padded.
    """
    if call.device != "cuda":
        return Reason("needs a CUDA GPU", f", this is {call.on()}")
    assert call.capability is not None
    if call.capability < (8, 0):
        return Reason("needs compute capability 8.0 or later", f", this is {call.on()}")
    if call.dtype not in HALF:
        wanted = " or ".join(map(short_dtype, HALF))
        return Reason(f"needs {wanted}", f", got {short_dtype(call.dtype)}")
    dims = call.qk_dim, call.v_dim
    if any(dim % 8 for dim in dims) or max(dims) > LARGEST:
        return Reason(f"needs head dims that are multiples of 8 up to {LARGEST}", f", got {dims}")
    if pads_values and call.v_dim > call.qk_dim:
        got = f", got {call.v_dim} and {call.qk_dim}"
        return Reason("needs values no wider than keys", got)
    return None


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``x`` with zeros appended to its last dim up to ``width``."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def to_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Return a view of tokens as ``[batch, s, H, D]``; packed tokens stay."""
    if isinstance(sequences, Packed):
        return x
    return x.unflatten(0, (-1, sequences.batch)).transpose(0, 1)


def from_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Undo :func:`to_kernel`."""
    return x if isinstance(sequences, Packed) else x.transpose(0, 1).flatten(0, 1)


def lse_from_kernel(lse: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Return ``[batch, H, s]``, or packed ``[H, tokens]``, as ``[tokens, H]``."""
    if isinstance(sequences, Packed):
        # Kernels disagree about queries without keys: some return +inf.
        lse = lse.transpose(0, 1)
        return lse.masked_fill(sequences.blind(lse.shape[0]), float("-inf"))
    return lse.permute(2, 0, 1).flatten(0, 1)


def lse_to_kernel(lse: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Undo :func:`lse_from_kernel`; contiguous."""
    if isinstance(sequences, Packed):
        return lse.transpose(0, 1).contiguous()
    return lse.unflatten(0, (-1, sequences.batch)).permute(1, 2, 0).contiguous()


def lengths(q: torch.Tensor, k: torch.Tensor, sequences: Dense | Packed) -> tuple:
    """Return ``(cu_q, cu_k, max_q, max_k)`` of kernel-shaped tensors; no ``cu`` if dense."""
    if isinstance(sequences, Packed):
        return sequences.cu_q, sequences.cu_k, sequences.longest, sequences.longest
    return None, None, q.shape[1], k.shape[1]
