"""Integer arithmetic, and matrix products in the accumulation dtype."""

from collections.abc import Iterator

import torch

from megatron_dsa.versions import parse_version

# torch.bmm takes `out_dtype`: tensor cores then return fp32 for 16-bit inputs.
_BMM_WIDENS = parse_version(torch.__version__) >= (2, 8)


def ceil_div(a: int, b: int) -> int:
    """Round ``a / b`` up; ``triton.cdiv`` takes a microsecond on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


_ACCUMULATION = {
    x: torch.promote_types(x, torch.float32)
    for x in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for 16-bit dtypes, else ``dtype`` itself."""
    return _ACCUMULATION.get(dtype) or torch.promote_types(dtype, torch.float32)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply ``[n, i, k] @ [n, k, j]`` in the accumulation dtype.

    A 16-bit result would put an error of 2^-9 on every attention logit.
    """
    dtype = accumulation_dtype(a.dtype)
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if a.is_cuda and _BMM_WIDENS:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def add_bmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    dtype = accumulation_dtype(a.dtype)
    if a.dtype == dtype:
        total.baddbmm_(a, b)
    elif a.is_cuda and _BMM_WIDENS:
        torch.baddbmm(total, a, b, out_dtype=dtype, out=total)
    elif not a.is_meta:  # a memory plan would count copies that a GPU does not make
        total.baddbmm_(a.to(dtype), b.to(dtype))


def sum_mm(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if total is not None:
        add_bmm(total[None], a[None], b[None])
    elif a.is_meta:
        total = a.new_empty(a.shape[0], b.shape[1], dtype=accumulation_dtype(a.dtype))
    else:
        total = mm(a, b)
    return total


def items_within(budget_bytes: int, bytes_per_item: int) -> int:
    return max(1, budget_bytes // max(1, bytes_per_item))


def valid_entries(
    indices: torch.Tensor, topk_length: torch.Tensor | None, num_keys: int
) -> torch.Tensor:
    valid = (indices >= 0) & (indices < num_keys)
    if topk_length is not None:
        slot = torch.arange(indices.shape[1], device=indices.device)
        valid &= slot < topk_length[:, None]
    return valid


def lengths(
    indices: torch.Tensor, topk_length: torch.Tensor | None, in_range: bool = False
) -> torch.Tensor:
    """Return the lengths of lists, int32 ``[Sq]``; clamp ``topk_length`` unless ``in_range``."""
    width = indices.shape[1]
    if topk_length is None:
        return torch.full(indices.shape[:1], width, dtype=torch.int32, device=indices.device)
    return (topk_length if in_range else topk_length.clamp(0, width)).int().contiguous()


def part_of(x: torch.Tensor, tokens: slice) -> torch.Tensor:
    """Return ``x[tokens]``, or ``x`` itself for all tokens, since a view costs host time."""
    start, stop, step = tokens.start, tokens.stop, tokens.step
    whole = not start and step in (None, 1) and (stop is None or stop == x.shape[0])
    return x if whole else x[tokens]


def slices(total: int, size: int) -> Iterator[slice]:
    for first in range(0, total, size):
        yield slice(first, min(total, first + size))
