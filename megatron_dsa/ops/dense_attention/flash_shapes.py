"""What the leaves over flash-attention kernels share: their shapes, and padding of values.

Kernels take ``[batch, s, H, D]``, or packed rows ``[rows, H, D]`` with ``cu_seqlens``, and keep the
log-sum-exp heads first.
"""

import torch

from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dispatch.support import HALF, OpCall, short_dtype

#: The widest head that they take.
LARGEST = 256


def common_reason(call: OpCall, pads_values: bool = False) -> str | None:
    """Return why no flash-attention kernel can run this, or ``None``.

    ``pads_values``: the kernels take one head dim, to which narrower values are padded.
    """
    if call.device != "cuda":
        return f"needs a CUDA GPU, this is {call.on()}"
    assert call.capability is not None
    if call.capability < (8, 0):
        return f"needs compute capability 8.0 or later, this is {call.on()}"
    if call.dtype not in HALF:
        return f"needs {' or '.join(map(short_dtype, HALF))}, got {short_dtype(call.dtype)}"
    dims = call.qk_dim, call.v_dim
    if any(dim % 8 for dim in dims) or max(dims) > LARGEST:
        return f"needs head dims that are multiples of 8 up to {LARGEST}, got {dims}"
    if pads_values and call.v_dim > call.qk_dim:
        return f"needs values no wider than keys, got {call.v_dim} and {call.qk_dim}"
    return None


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x`` with zeros appended to its last dim up to ``width``."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def to_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Rows to ``[batch, s, H, D]``, a view; packed rows stay."""
    if isinstance(sequences, Packed):
        return x
    return x.unflatten(0, (-1, sequences.batch)).transpose(0, 1)


def from_kernel(x: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """Undo :func:`to_kernel`."""
    return x if isinstance(sequences, Packed) else x.transpose(0, 1).flatten(0, 1)


def lse_from_kernel(lse: torch.Tensor, sequences: Dense | Packed) -> torch.Tensor:
    """``[batch, H, s]``, or packed ``[H, rows]``, to ``[rows, H]``."""
    if isinstance(sequences, Packed):
        # Kernels disagree about rows without keys: some say +inf.
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
