"""Triton kernel that gathers tokens from up to four tensors."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_dsa.ops.common.launch import launch

_BLOCK = 1024
_TENSORS = 4


@triton.jit
def _copy(x, out, source, target, size, block, BLOCK: tl.constexpr):
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + source * size + column, mask=inside)
    tl.store(out + target * size + column, values, mask=inside)


# New sizes and alignments must not recompile the kernel.
@triton.jit(
    do_not_specialize=["size", "size_b", "size_c", "size_d"],
    do_not_specialize_on_alignment=["tokens", "x", "x_b", "x_c", "x_d"],
)
def _select(
    tokens, x, out, size, x_b, out_b, size_b, x_c, out_c, size_c, x_d, out_d, size_d,
    BLOCK: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(0).to(tl.int64)
    source = tl.load(tokens + target)
    block = tl.program_id(1)
    blocks = tl.cdiv(size, BLOCK)
    if block < blocks:
        _copy(x, out, source, target, size, block, BLOCK)
    elif x_b is not None:
        block -= blocks
        blocks = tl.cdiv(size_b, BLOCK)
        if block < blocks:
            _copy(x_b, out_b, source, target, size_b, block, BLOCK)
        elif x_c is not None:
            block -= blocks
            blocks = tl.cdiv(size_c, BLOCK)
            if block < blocks:
                _copy(x_c, out_c, source, target, size_c, block, BLOCK)
            elif x_d is not None:
                _copy(x_d, out_d, source, target, size_d, block - blocks, BLOCK)


def select(tokens: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    count = tokens.shape[0]
    found = [x.new_empty(count, *x.shape[1:]) for x in tensors]
    sizes = [x.numel() // count if count else 0 for x in found]
    some = [part for part in zip(tensors, found, sizes, strict=True) if part[2]]
    for first in range(0, len(some), _TENSORS):
        now = some[first : first + _TENSORS]
        blocks = sum(-(-size // _BLOCK) for _, _, size in now)
        arguments = [x for part in now for x in part]
        arguments += [None, None, 0] * (_TENSORS - len(now))
        launch(_select, (count, blocks), tokens, *arguments, BLOCK=_BLOCK, num_warps=4)
    return found
