"""What implementations share: accumulation dtype, products, row budgets, validity of entries."""

from __future__ import annotations

import functools

import torch

from megatron_dsa.dispatch.packages import TRITON
from megatron_dsa.versions import parse_version

# bmm with a wider output dtype than its operands: tensor cores with an fp32 result.
_BMM_WIDENS = parse_version(torch.__version__) >= (2, 8)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for the 16-bit types, the type itself otherwise (fp64 stays fp64)."""
    return torch.promote_types(dtype, torch.float32)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product ``[n, i, k] @ [n, k, j]`` in the accumulation dtype of its operands.

    16-bit operands stay 16-bit on the way into the GPU's matrix units; rounding the *result* to 16
    bits would put an error of 2^-9 on every attention logit.
    """
    dtype = accumulation_dtype(a.dtype)
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if a.is_cuda and _BMM_WIDENS:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product ``[i, k] @ [k, j]`` with the numerics of :func:`bmm`."""
    return bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def scaled(gradient: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype | None = None):
    """Return ``factor * gradient``, multiplied in fp32, in ``dtype`` (default: the gradient's)."""
    dtype = gradient.dtype if dtype is None else dtype
    if isinstance(factor, torch.Tensor) and factor.device.type == "cpu":
        factor = factor.item()  # copying a tensor of the host would synchronise
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float64, device=gradient.device)
    # With one dim the factor keeps its dtype, and the product is rounded where it is written.
    factor = factor.to(accumulation_dtype(gradient.dtype)).view(1)
    out = torch.empty_like(gradient, dtype=dtype)
    fits = gradient.is_cuda and gradient.is_contiguous() and factor.dtype == torch.float32
    if fits and has_triton():
        from megatron_dsa.ops.scaling import scale

        return scale(gradient, factor, out)
    return torch.mul(gradient, factor, out=out)


@functools.cache
def has_triton() -> bool:
    """Whether small helpers may be Triton kernels; operations ask through dispatch."""
    return TRITON.problem() is None


def rows_in_budget(budget_bytes: int, bytes_per_row: int) -> int:
    """How many rows fit the workspace; at least one, or nothing could run."""
    return max(1, budget_bytes // max(1, bytes_per_row))


def valid_entries(indices: torch.Tensor, topk_length: torch.Tensor | None, num_keys: int):
    """Bool ``[Sq, K]``: entries that select a key."""
    valid = (indices >= 0) & (indices < num_keys)
    if topk_length is not None:
        place = torch.arange(indices.shape[1], device=indices.device)
        valid &= place < topk_length[:, None]
    return valid


def lengths(indices: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    """Return int32 ``[Sq]`` within ``[0, K]``: ``topk_length``, or ``K`` everywhere."""
    width = indices.shape[1]
    if topk_length is None:
        return torch.full(indices.shape[:1], width, dtype=torch.int32, device=indices.device)
    return topk_length.clamp(0, width).int().contiguous()
