"""A gradient times a number on the device, in one pass.

torch multiplies tensors of different dtypes element by element, at a sixth of the GPU's bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements of a program.
BLOCK = 4096


@triton.jit(do_not_specialize=["count"])
def _scale(x, factor, out, count, BLOCK: tl.constexpr):
    """Multiplied in fp32, rounded once."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    values = tl.load(x + place, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


def scale(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return ``out = x * factor``.

    Args:
        x: 16-bit or fp32, contiguous, on a GPU.
        factor: fp32, one element, on the same GPU.
        out: of x's shape, contiguous, 16-bit or fp32.
    """
    count = x.numel()
    if count:
        _scale[(triton.cdiv(count, BLOCK),)](x, factor, out, count, BLOCK=BLOCK, num_warps=8)
    return out
