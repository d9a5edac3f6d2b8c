"""Gradients of parameters in Triton: partial sums of programs, added in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add(partial, total, parts, width, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``total [width]`` of ``partial [parts, width]`` for ``COLUMNS`` columns, ``ROWS`` at once."""
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + row
        at = part.to(tl.int64)[:, None] * width + column[None, :]
        sums += tl.load(partial + at, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["fn_parts", "weight_parts", "rest_parts", "fn_programs"])
def add_parts(
    fn, dfn, weight, dweight, rest, drest, fn_parts, weight_parts, rest_parts, fn_programs,
    FN: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    FN_COLUMNS: tl.constexpr, C_COLUMNS: tl.constexpr, REST_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over parts: ``fn [.., FN]``, the norm's ``weight [.., C]``, and ``rest [.., REST]``.

    Programs up to ``fn_programs`` add the first, the last program adds the last. Few columns have
    many parts, of which more are loaded at once.
    """
    program = tl.program_id(0)
    if program < fn_programs:
        _add(fn, dfn, fn_parts, FN, program, 1, FN_COLUMNS)
    elif program < tl.num_programs(0) - 1:
        _add(weight, dweight, weight_parts, C, program - fn_programs, 64, C_COLUMNS)
    else:
        _add(rest, drest, rest_parts, REST, 0, 128, REST_COLUMNS)
