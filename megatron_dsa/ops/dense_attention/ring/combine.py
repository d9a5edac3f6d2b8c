"""Joining attention over blocks of keys: sums of outputs, weighted by their log-sum-exp.

``w = 1 / (1 + exp(lse - part_lse))`` is the part's share of the joint softmax. A block costs one
pass; the first one none, and the last one writes the result in its own dtype.
"""

from functools import cache
from typing import Any

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch.packages import TRITON


class Combined:
    """Output and lse over all blocks so far.

    Args:
        dtype: of the result; sums in between are in its accumulation dtype.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.out: Any = None  # tensors once the first part is there
        self.lse: Any = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, rows: slice, last: bool) -> None:
        """Add a part ``out [n, H, Dv]``, ``lse [n, H]`` of the query rows ``rows``.

        The first part must be of all rows. After the ``last`` one, ``self.out`` is the result.
        """
        if self.out is None:
            self.lse = lse.contiguous()
            self.out = out.to(self.dtype).contiguous() if last else out
            return
        dtype = self.dtype if last else accumulation_dtype(self.dtype)
        first = rows.start or 0
        merge = _fused_merge(out.device.type, out.dtype) or merge_torch
        self.out = merge(self.out, self.lse, out, lse, first, dtype)


def merge_torch(sums, lse, part, part_lse, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Merge ``part`` into ``sums`` from row ``first`` on.

    Args:
        sums: ``[rows, H, Dv]``; lse: ``[rows, H]``, updated in place.
        part: ``[n, H, Dv]``; part_lse: ``[n, H]``; ``n`` may be less than the rows from there on.
        dtype: of the result; ``sums`` itself is overwritten if it has it.

    Returns:
        the merged sums ``[rows, H, Dv]`` in ``dtype``, contiguous.
    """
    acc, rows = accumulation_dtype(dtype), slice(first, first + part.shape[0])
    old = lse[rows]
    # Rows that neither has seen: -inf minus -inf.
    share = torch.sigmoid(part_lse - old).nan_to_num_(0.0)[..., None]
    torch.logaddexp(old, part_lse, out=old)
    merged = torch.lerp(sums[rows].to(acc), part.to(acc), share.to(acc))
    result = sums.to(dtype).contiguous()
    result[rows] = merged
    return result


@cache
def _fused_merge(device: str, dtype: torch.dtype):
    if device != "cuda" or dtype == torch.float64 or TRITON.problem() is not None:
        return None
    from megatron_dsa.ops.dense_attention.ring.combine_triton import merge

    return merge
