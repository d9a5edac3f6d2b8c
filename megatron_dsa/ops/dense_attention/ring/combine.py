"""Combination of partial attention outputs, weighted by their log-sum-exp.

The weight of a part in the joint softmax is ``1 / (1 + exp(lse - part_lse))``.
"""

from functools import cache
from typing import Any

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch.packages import TRITON


class Combined:
    """Output and lse of all blocks so far, in the accumulation dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.out: Any = None
        self.lse: Any = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, tokens: slice, last: bool) -> None:
        """Combine partial ``out [n, H, Dv]`` and ``lse [n, H]`` of some query tokens with the sum.

        The first part must have all tokens; the ``last`` converts ``self.out`` to the result dtype.
        """
        if self.out is None:
            self.lse = lse.contiguous()
            self.out = out.to(self.dtype).contiguous() if last else out
            return
        dtype = self.dtype if last else accumulation_dtype(self.dtype)
        first = tokens.start or 0
        merge = _fused_merge(out.device.type, out.dtype) or merge_torch
        self.out = merge(self.out, self.lse, out, lse, first, dtype)


def merge_torch(sums, lse, part, part_lse, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Merge ``part [n, H, Dv]`` into ``sums [tokens, H, Dv]`` from token ``first`` on.

    Updates ``lse`` in place, and ``sums`` if it has the result's ``dtype``.
    """
    acc, tokens = accumulation_dtype(dtype), slice(first, first + part.shape[0])
    old = lse[tokens]
    # For tokens without visible keys, -inf - -inf is NaN.
    share = torch.sigmoid(part_lse - old).nan_to_num_(0.0)[..., None]
    torch.logaddexp(old, part_lse, out=old)
    merged = torch.lerp(sums[tokens].to(acc), part.to(acc), share.to(acc))
    result = sums.to(dtype).contiguous()
    result[tokens] = merged
    return result


@cache
def _fused_merge(device: str, dtype: torch.dtype):
    if device != "cuda" or dtype == torch.float64 or TRITON.problem() is not None:
        return None
    from megatron_dsa.ops.dense_attention.ring.combine_triton import merge

    return merge
